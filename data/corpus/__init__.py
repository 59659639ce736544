"""Corpora: token shards and their cache."""
