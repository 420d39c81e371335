"""Server part of the Flower app: runs the configuration in the file that `settings` names."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedjax_pfl.deploy import flower

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Calls `flower.run_from_file`."""
    flower.run_from_file(grid, str(context.run_config["settings"]))
