"""The functions of `import thinker` that do what the commands do."""
