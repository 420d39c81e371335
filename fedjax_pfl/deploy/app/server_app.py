"""Flower's app of the server: a run, as the file that `settings` names says."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedjax_pfl.deploy import flower

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """See `flower.run_by`."""
    flower.run_by(grid, str(context.run_config["settings"]))
