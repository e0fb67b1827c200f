"""Read Hugging Face folders into shards, and write them from shards."""

from .load import load_pretrained as load_pretrained
from .save import save_pretrained as save_pretrained
