"""Runs methods of FL-bench (KarhouTam/FL-bench) on the work of `experiments.agree`.

Rounds of its servers run unchanged from the user's checkout; evaluation is off by its own settings.
The adapter records the parameters after each round. With a seed it records each client's test
accuracy by FL-bench's count before and after one more round of training. If FL-bench uses personal
models only in tests, it records the accuracies of a test, before and after fine-tuning.

It replaces the dataset, the network, and Hydra's facts about the run. Floco gets the numbers of its
random points, and PeFLL this library's embedding network, because FL-bench's reads only images.
Needs the packages of `rival_fl_bench.py`; cvxpy for FedPAC, faiss-cpu for kNN-Per, and statsmodels
and pytorch-minimize for pFedFDA.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import fl_bench

# Module, which is the method's name in FL-bench, and class of the server.
_SERVERS = {
    "fedavg": ("fedavg", "FedAvgServer"),
    "fedprox": ("fedprox", "FedProxServer"),
    "fedper": ("fedper", "FedPerServer"),
    "fedrep": ("fedrep", "FedRepServer"),
    "fedbabu": ("fedbabu", "FedBabuServer"),
    "fedrod": ("fedrod", "FedRoDServer"),
    "fedbn": ("fedbn", "FedBNServer"),
    "lg_fedavg": ("lgfedavg", "LGFedAvgServer"),
    "pfedme": ("pfedme", "pFedMeServer"),
    "ditto": ("ditto", "DittoServer"),
    "apfl": ("apfl", "APFLServer"),
    "fedala": ("fedala", "FedALAServer"),
    "scaffold": ("scaffold", "SCAFFOLDServer"),
    "feddyn": ("feddyn", "FedDynServer"),
    "fedpac": ("fedpac", "FedPACServer"),
    "fedas": ("fedas", "FedASServer"),
    "moon": ("moon", "MOONServer"),
    "fedlc": ("fedlc", "FedLCServer"),
    "knn_per": ("knnper", "kNNPerServer"),
    "pfedfda": ("pfedfda", "pFedFDAServer"),
    "floco": ("floco", "FlocoServer"),
    "flute": ("flute", "FLUTEServer"),
    "pefll": ("pefll", "PeFLLServer"),
}
_MADE_BY_CLIENTS = ("pfedfda", "floco", "pefll")  # a client makes the model that it evaluates
_EVALUATED_IN_TESTS = ("knn_per", "pfedfda")  # their personal models are not used around training


def prepare(spec: child.Spec) -> tuple[dict[str, Any], Callable[[], None]]:
    """Returns facts about the library, and a function that does the next run at each call."""
    child.checkout(spec, *fl_bench.NEEDS)
    child.check_methods(spec, _SERVERS)
    import torch

    torch.set_num_threads(1)  # more threads only wait with a network this small
    runs = iter(spec["runs"])

    def run() -> None:
        make_run(spec["checkout"], next(runs))()

    return {"versions": child.versions("torch")}, run


def make_run(checkout: str, spec: child.Spec) -> Callable[[], None]:
    """Returns a function that trains with a server of FL-bench and writes its results."""
    method = spec["algorithm"]
    import numpy as np
    import state
    import torch
    from data.utils.datasets import DATASETS
    from src.utils.models import MODELS, DecoupledModel

    work, start = state.read_work(spec["work"])
    clients, examples = work["y"].shape
    parts = ("x", "test_x") if "test_x" in work else ("x",)
    features = work["x"].shape[-1]
    x = torch.from_numpy(np.concatenate([work[p].reshape(-1, features) for p in parts]))
    labels = [work[p.replace("x", "y")].reshape(-1) for p in parts]
    y = torch.from_numpy(np.concatenate(labels).astype(np.int64))
    train_rows = np.arange(clients * examples).reshape(clients, -1).tolist()
    test_rows = np.arange(clients * examples, len(y)).reshape(clients, -1).tolist()
    fl_bench.write_partition(Path("data/mnist"), train_rows, test_rows)

    class Examples(torch.utils.data.Dataset):
        """The work's examples without augmentation or normalisation."""

        data, targets, classes = x, y, list(range(10))

        def __init__(self, **_: Any) -> None:
            """Ignores the transforms."""

        def __getitem__(self, index: int) -> Any:
            return x[index], y[index]

        def __len__(self) -> int:
            return len(y)

        def train(self) -> None:
            """Does nothing: training and evaluation use the same examples."""

        eval = train

    class Network(DecoupledModel):
        """The work's network, divided into body and head."""

        def __init__(self, dataset: str, pretrained: bool) -> None:
            super().__init__()
            self.base, self.classifier = state.network(start)

    DATASETS["mnist"], MODELS["library"] = Examples, Network
    settings = dict(spec["settings"])
    if method == "fedpac":
        settings["classifier_lr"] = spec["rate"]
    options = {
        "join_ratio": 1.0,
        "global_epoch": spec["rounds"] + 1,
        "local_epoch": spec["epochs"],
        "batch_size": spec.get("batch", examples),
        "use_cuda": False,
    }
    if method == "pefll":
        options["buffers"] = "local"  # it refuses to share them
        importlib.import_module("src.server.pefll").EmbedNetwork = lambda _: state.Embedding(work)
    server = fl_bench.make_server(
        checkout,
        _SERVERS[method],
        ("mnist", "library"),
        spec["rate"],
        options,
        test=True,
        settings=settings,
    )
    worker, record = server.trainer.worker, state.Record(spec["out"])
    if method == "pfedfda":
        server.global_means = torch.from_numpy(work["added/means"])
    if method == "floco":
        state.set_endpoints(server.public_model_params, start)
    if method == "pefll":
        state.set_hypernetwork(server.hyper_net, work)

    def client_model(i: int) -> dict[str, Any]:
        """Returns the model that a client makes for a test."""
        worker.testing = True
        worker.set_parameters(server.package(i))
        worker.testing = False
        worker.model.eval()
        with torch.no_grad():
            worker.model(x[:1])  # Floco mixes its endpoints in a call
            classifier = worker.model.classifier
            head = {leaf: getattr(classifier, leaf) for leaf in ("weight", "bias")}
        return state.parameters_of(worker.model.base) | state.rename(head)

    def client_parameters(i: int) -> dict[str, Any]:
        """Returns the model that a client is evaluated with, or its control variates."""
        if method == "scaffold":
            return state.control_variates(start, server.c_local[i])
        if method == "pfedme":  # trains its personal model anew
            return {}
        if method in _MADE_BY_CLIENTS:
            return client_model(i)
        package = server.package(i)
        for key in ("personalized_model_params", "local_model_params", "prev_model_state"):
            if package.get(key):
                return state.rename(package[key])
        return state.rename({**package["regular_model_params"], **package["personal_model_params"]})

    def record_round() -> None:
        shared = state.rename(server.public_model_params)
        if method == "scaffold":
            shared |= state.control_variates(start, server.c_global)
        if method == "floco":
            shared["fc2.weight"] = state.endpoints(server.public_model_params)
            del shared["fc2.bias"]  # one for all endpoints
        record.add(shared, {i: client_parameters(i) for i in range(clients)})

    def run_round(t: int) -> None:
        server.current_epoch = t
        server.selected_clients = list(server.client_sample_stream[t])
        if method == "floco" and "seed" not in spec:
            points = work["added/points"][t][server.selected_clients]
            numbers = iter(points.reshape(-1, points.shape[-1]))
            np.random.exponential = lambda **_: next(numbers)
        server.train_one_round()

    def run() -> None:
        record_round()
        for t in range(spec["rounds"]):
            run_round(t)
            record_round()
        record.write()

    def run_scored() -> None:
        scores, last = state.Scores(spec["out"], clients), spec["rounds"]
        torch.manual_seed(spec["seed"])
        for t in range(last):
            run_round(t)
        server.args.common.client_side_evaluation = True
        if method in _EVALUATED_IN_TESTS:
            server.args.common.test.client.finetune_epoch = spec["epochs"]
            results = [worker.test(server.package(i)) for i in range(clients)]
        else:
            run_round(last)
            results = [server.client_metrics[i][last] for i in range(clients)]
        for i, stages in enumerate(results):
            scores.before[i] = stages["before"]["test"].accuracy / 100
            scores.after[i] = stages["after"]["test"].accuracy / 100
        scores.write()

    return run_scored if "seed" in spec else run


if __name__ == "__main__":
    child.serve(prepare)
