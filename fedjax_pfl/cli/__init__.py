"""The installed command `fedjax-pfl`."""
