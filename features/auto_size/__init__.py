"""model.size=auto: choose the model from the text and the training time."""
