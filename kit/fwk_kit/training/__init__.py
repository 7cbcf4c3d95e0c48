"""Training of heads that draft: what ``fwk train-draft`` runs."""
