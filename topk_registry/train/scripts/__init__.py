"""Run a user's copy of timm's or torchvision's training script with a registered loss."""
