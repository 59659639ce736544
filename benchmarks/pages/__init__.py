"""The benchmark pages of the documentation: tables made from recorded results."""
