"""The commands of `thinker`. Each module has a main(), which parses sys.argv."""
