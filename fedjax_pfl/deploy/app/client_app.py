"""Client part of the Flower app. Nodes never run it, see `fedjax_pfl.deploy.supernode`."""

app = None  # Flower rejects an app without this name.
raise RuntimeError(
    "this node runs code that its server has sent; start it with fedjax_pfl.deploy.supernode"
)
