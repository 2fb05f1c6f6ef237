"""The torch twin of every routine: readable first, and the meaning of its fused twin, to the
byte."""
