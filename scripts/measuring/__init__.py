"""The programs behind scripts/instructions, scripts/peers and scripts/sweep. They need Python 3.9 and its standard library."""
