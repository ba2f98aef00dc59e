"""From the configuration of a run to its parts: data, loaders, model, loss, device."""
