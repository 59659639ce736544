"""Monitoring: figures of attention during training and generation."""
