"""Calls of tools in chats: how a model writes them, and how they become those of the API."""
