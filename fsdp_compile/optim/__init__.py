"""Optimizers that need whole matrices of sharded parameters, and the exchange that they are made of."""

from .muon import Muon as Muon
from .muon import muon_groups as muon_groups
from .owners import Owners as Owners
from .whole import WholeTensorOptimizer as WholeTensorOptimizer
