"""One file a family: what a record is, where the selection comes from, which decode attention reads it."""
