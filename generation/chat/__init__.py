"""Conversations: texts that the user and the model write in turns."""
