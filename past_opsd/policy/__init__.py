"""One frozen base with its adapters: loading, packing, attention, the loss over its head, several processes."""
