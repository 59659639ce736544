"""Callbacks that a config chooses by name. Imports no torch, as configs check names here."""

from thinker.runtime.registry import Registry

# A value is a function (Settings) -> Callback. Modules in a config's `extensions` register them.
CALLBACKS: Registry = Registry("callback")
