"""What verifiers say about the answers of a finished model."""
