"""Streams: sources that are tokenized while they are trained on."""
