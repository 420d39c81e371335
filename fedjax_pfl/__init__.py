"""Personalised federated learning, compiled."""
