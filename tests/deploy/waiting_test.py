"""Waiting for nodes that are offline, without sleeping."""

from tests.deploy.flower_test import Grid, grid, make_exchange

__all__ = ["grid"]


def test_waiting_ends_when_a_client_that_was_offline_returns(grid, tmp_path):
    exchange, _ = make_exchange(grid, tmp_path)
    online, (first, second) = [], grid.all

    def get_nodes():
        grid.all = online.pop(0) if online else (first,)
        return Grid.get_nodes(grid)

    grid.get_nodes = get_nodes
    online[:] = [(first,), (first,), (first, second), ()]
    exchange.wait_for_return([0, 1], 30)
    assert online == [()]
    online[:] = [(first, second), ()]  # nobody is missing
    exchange.wait_for_return([0, 1], 30)
    assert online == [()]
    online.clear()
    exchange.wait_for_return([1], 0.01)
    exchange.wait_for_return([1], -1.0)
