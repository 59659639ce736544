"""Speed and memory of training steps, attention and decoding."""
