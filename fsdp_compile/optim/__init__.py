"""Optimizers for sharded parameters: on whole matrices, and with their states on the host."""

from .muon import Muon as Muon
from .muon import muon_groups as muon_groups
from .on_host import StatesOnHost as StatesOnHost
from .owners import Owners as Owners
from .whole import WholeTensorOptimizer as WholeTensorOptimizer
