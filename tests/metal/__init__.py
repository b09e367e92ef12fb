"""Helpers of the Metal tests: the emulated device and how to call it."""
