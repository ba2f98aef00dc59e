"""The user's own copy of timm's or torchvision's training script, run with a registered loss."""
