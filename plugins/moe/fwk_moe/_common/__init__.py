"""What MoE runners share."""
