"""Looking into a pass of the model: activations by name, attention weights, and figures of them."""
