"""Trains a transformer on text through this package's attention: see ``--help``.

Run it as ``python -m jax_flashtrain.train`` or ``jax-flashtrain-train``.
"""
