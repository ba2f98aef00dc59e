"""Base classes of losses. These classes handle targets, options, half precision and the reduction."""
