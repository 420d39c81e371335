"""The client part of the Flower app, which no node runs: see fedjax_pfl.deploy.supernode."""

app = None  # Flower does not take an app without this name
raise RuntimeError(
    "this node runs code that its server has sent; start it by fedjax_pfl.deploy.supernode, which "
    "runs the node's own code instead"
)
