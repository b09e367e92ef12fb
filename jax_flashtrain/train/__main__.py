import sys

from jax_flashtrain.train.cli import main

sys.exit(main())
