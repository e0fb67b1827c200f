"""Folders of Hugging Face, read into shards and written from them."""

from .load import load_pretrained as load_pretrained
from .save import save_pretrained as save_pretrained
