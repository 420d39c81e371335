"""Methods that are compared with other libraries: their settings, and why some results differ.

`Method.settings` are settings of this library. `Rival` has the same settings by other names.
`Rival.why` tells which code of the rival differs, and which library follows the paper.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

EPOCHS = 3


class Rival(NamedTuple):
    """A method in another library."""

    settings: Mapping[str, Any]
    epochs: int = EPOCHS  # local epochs as it counts them
    why: str = ""  # reason why parameters differ
    accuracy: str = ""  # reason why accuracies differ


class Method(NamedTuple):
    """A method of this library, and the same method of others by library."""

    settings: Mapping[str, Any]
    pfllib: Rival | None = None
    fl_bench: Rival | None = None
    norm: bool = False  # the network has BatchNorm
    examples: int = 30  # per client, all in one batch
    first_rounds: int = 0  # rounds of ours that a rival does before its first


_PFLLIB_PFEDME = (
    "`pFedMeOptimizer.step` adds a weight decay of 0.001 θ that no flag removes. Without it the "
    "parameters are the same"
)
_PFLLIB_APFL = (
    "the loss of a client's model is minimised at v, in the paper at the mixture, and α changes "
    "in every step"
)
_PFLLIB_FEDDYN = (
    "clientdyn.py adds α/2 ‖θ − w‖ to the loss, the paper its square. With the square the "
    "parameters are the same"
)
_PFLLIB_FEDPROTO = (
    "prototypes are averaged during training, in the paper computed with the trained model. The "
    "server takes their plain mean, in the paper weighted by examples"
)
_FL_BENCH_FEDROD = (
    "client/fedrod.py renames the network's parameters, so the server's are not loaded, and one "
    "network is trained from client to client. It also predicts with the personal head alone and "
    "lets its loss train the body"
)
_FL_BENCH_LG_FEDAVG = (
    "client/lgfedavg.py keeps the last layers at the client and shares the first ones. The paper "
    "does the opposite"
)
_FL_BENCH_APFL = (
    "client/apfl.py mixes the outputs of the two models, the paper their parameters. It also "
    "applies one gradient twice to the shared model"
)
_FL_BENCH_FEDALA = (
    "client/fedala.py uses one object for all clients, so each client inherits W and the local "
    "model of the previous one"
)
_FL_BENCH_SCAFFOLD = (
    "server/scaffold.py does not store the clients' new control variates, so every c_i stays 0"
)
_FL_BENCH_FEDDYN = (
    "client/feddyn.py leaves α/2 ‖θ‖² out of the quadratic term. It expects a weight decay of α "
    "instead, which is 0 by default"
)
_FL_BENCH_FEDPAC = (
    "in the first round client/fedpac.py pulls features to the client's own means; the paper has "
    "no such term. server/fedpac.py also sets head weights below 0.001 to 0"
)
_PFLLIB_FEDPAC = (
    "serverpac.py computes head weights in one order of clients and applies them in a shuffled "
    "one. Heads are replaced while others are still to be mixed, and prototypes are plain means "
    "over clients"
)
_FL_BENCH_FEDAS = (
    "client/fedas.py continues from the mean head, in the paper each client continues from its "
    "own. It also aligns the mean of a class's features, not each of them"
)
_ORDERS_OF_BATCHES = (
    "the order of batches. With the same batches the parameters are the same. With four other "
    "orders this library reaches 95.2 to 95.8 after training, on the same three partitions"
)
_OTHER_BATCHES = (
    "probably the order of batches. With the same batches the parameters are the same, and the "
    "accuracy of FL-bench is between both"
)
_NOT_TUNED = (
    "it evaluates before the model is fine-tuned, this library after it. After local training, "
    "which has no fine-tuning, both agree"
)
_PFLLIB_SERVES_W = (
    "it evaluates w, this library θ. Its 87.5, 83.0 and 88.9 match our 87.6, 83.1 and 89.3 for w"
)
_FL_BENCH_SERVES_THE_START = (
    "client/pfedme.py evaluates `personalized_params_dict`, which no line updates: the initial "
    "parameters"
)
_FL_BENCH_SERVES_THE_MEAN_HEAD = (
    "client/fedas.py evaluates the mean head on an aligned body. In the paper and here it is "
    "the client's own head"
)
_PFLLIB_FEDLC = (
    "serverlc.py calibrates with the numbers of examples of all clients together, in the paper "
    "each client with its own"
)
_PFLLIB_GPFL = (
    "clientgpfl.py takes the norm of a whole batch in the λ term. Conditions are 0 in the first "
    "round, later computed from the client's C_i before the average, and p_i is a sum over classes"
)
_PFLLIB_FEDCAC = (
    "servercac.py makes no u_i after the first round, so critical parameters go back to their "
    "initial values"
)
_PFLLIB_FEDGH = (
    "the server trains the head object of client 0, which has that client's local steps too. It "
    "takes a step for a shuffled batch of class means, in the paper one for each mean"
)
_PFLLIB_FML = (
    "clientfml.py divides the divergence by the number of classes, and its gradient also moves "
    "the model that teaches"
)
_FL_BENCH_PFEDFDA = (
    "client/pfedfda.py trains body and head as in FedAvg. It computes Gaussians only in tests, so "
    "the server's stay at their random start"
)
_FL_BENCH_FLOCO = (
    "server/floco.py has one bias of the head for all endpoints, here each endpoint has its own"
)
_FL_BENCH_FLUTE = "client/flute.py detaches the features in training, so the body is never trained"
_FL_BENCH_PEFLL = (
    "client/pefll.py subtracts the mean of a client's descriptor and divides it by its standard "
    "deviation, in every round; the paper does neither"
)
_AS_PARAMETERS = "its parameters differ, for the reason given above"
METHODS = {
    "fedavg": Method({}, Rival({}, accuracy=_ORDERS_OF_BATCHES), Rival({})),
    "fedprox": Method({"mu": 0.1}, Rival({"mu": 0.1}), Rival({"mu": 0.1})),
    "fedper": Method({}, Rival({}), Rival({})),
    "fedrep": Method(
        {"head_epochs": 2},
        Rival({"plocal_epochs": 2}),
        Rival({"train_body_epoch": EPOCHS}, EPOCHS + 2),
    ),
    "fedbabu": Method({}, Rival({}, accuracy=_NOT_TUNED), Rival({}, accuracy=_NOT_TUNED)),
    "fedrod": Method({}, Rival({}), Rival({}, why=_FL_BENCH_FEDROD, accuracy=_AS_PARAMETERS)),
    "fedbn": Method({}, Rival({}), Rival({}), norm=True),
    "lg_fedavg": Method(
        {"shared_layers": 1},
        Rival({}),
        Rival({"num_global_layers": 1}, why=_FL_BENCH_LG_FEDAVG),
    ),
    "pfedme": Method(
        {"penalty": 15.0, "inner_steps": 5, "inner_rate": 0.01},
        Rival(
            {"lamda": 15.0, "K": 5, "p_learning_rate": 0.01, "beta": 1.0},
            why=_PFLLIB_PFEDME,
            accuracy=_PFLLIB_SERVES_W,
        ),
        Rival(
            {"lamda": 15.0, "k": 5, "pers_lr": 0.01, "beta": 1.0, "mu": 0.0},
            accuracy=_FL_BENCH_SERVES_THE_START,
        ),
    ),
    "ditto": Method(
        {"penalty": 0.5, "own_epochs": 2},
        Rival({"mu": 0.5, "plocal_epochs": 2}),
        Rival({"lamda": 0.5, "pers_epoch": 2}),
    ),
    "apfl": Method(
        {"alpha": 0.5},
        Rival({"alpha": 0.5}, why=_PFLLIB_APFL),
        Rival({"alpha": 0.5, "adaptive_alpha": 0}, why=_FL_BENCH_APFL),
    ),
    "fedala": Method(
        {"share": 1.0, "first_passes": 11},
        Rival({"eta": 1.0, "rand_percent": 100, "layer_idx": 2}),
        Rival(
            {"eta": 1.0, "rand_percent": 1.0, "layer_idx": 2},
            why=_FL_BENCH_FEDALA,
            accuracy=_AS_PARAMETERS,
        ),
    ),
    "scaffold": Method(
        {},
        Rival({"server_learning_rate": 1.0}),
        Rival({"global_lr": 1.0}, why=_FL_BENCH_SCAFFOLD),
    ),
    "feddyn": Method(
        {"alpha": 0.1},
        Rival({"alpha": 0.1}, why=_PFLLIB_FEDDYN),
        Rival({"alpha": 0.1, "max_grad_norm": 1e9}, why=_FL_BENCH_FEDDYN, accuracy=_AS_PARAMETERS),
    ),
    "fedpac": Method(
        {"penalty": 1.0, "head_epochs": 1},
        Rival({"lamda": 1.0}, why=_PFLLIB_FEDPAC),
        Rival({"lamda": 1.0, "train_classifier_round": 1}, EPOCHS + 1, why=_FL_BENCH_FEDPAC),
    ),
    "fedas": Method(
        {"align_rate": 0.01, "align_epochs": 1},
        Rival({}),
        Rival(
            {"alignment_lr": 0.01, "alignment_epoch": 1},
            why=_FL_BENCH_FEDAS,
            accuracy=_FL_BENCH_SERVES_THE_MEAN_HEAD,
        ),
        examples=16,  # the number that FL-bench aligns with
    ),
    "fedproto": Method({"penalty": 1.0}, Rival({"lamda": 1.0}, why=_PFLLIB_FEDPROTO)),
    "moon": Method(
        {"mu": 1.0, "temperature": 0.5},
        Rival({"mu": 1.0, "tau": 0.5}, accuracy=_OTHER_BATCHES),
        Rival({"mu": 1.0, "tau": 0.5}),
    ),
    "fedlc": Method(
        {"tau": 1.0},
        Rival({"tau": 1.0}, why=_PFLLIB_FEDLC, accuracy=_AS_PARAMETERS),
        Rival({"tau": 1.0}),
    ),
    "gpfl": Method(
        {"penalty": 0.01, "decay": 0.1},
        Rival({"lamda": 0.01, "mu": 0.1}, why=_PFLLIB_GPFL, accuracy=_AS_PARAMETERS),
    ),
    "fedcp": Method({"penalty": 5.0}, Rival({"lamda": 5.0})),
    "feddbe": Method(
        {"penalty": 1.0, "mean_momentum": 1.0},
        Rival({"kl_weight": 1.0, "momentum": 1.0}),
        first_rounds=1,
    ),
    "fedcac": Method(
        {"critical_share": 0.5, "alone_after": 10},
        Rival({"tau": 0.5, "beta": 10}, why=_PFLLIB_FEDCAC),
    ),
    "fedgh": Method({"rate": 0.1}, Rival({"server_learning_rate": 0.1}, why=_PFLLIB_FEDGH)),
    "fml": Method({"alpha": 0.5, "beta": 0.5}, Rival({"alpha": 0.5, "beta": 0.5}, why=_PFLLIB_FML)),
    "knn_per": Method(
        {"neighbours": 5, "weight": 0.5, "scale": 1.0},
        None,
        Rival({"k": 5, "weight": 0.5, "scale": 1.0, "capacity": 500}),
    ),
    "pfedfda": Method(
        {"ridge": 1.0},
        None,
        Rival({"single_beta": True}, why=_FL_BENCH_PFEDFDA, accuracy=_AS_PARAMETERS),
    ),
    "floco": Method(
        {"endpoints": 3, "place_after": 10, "radius": 0.1},
        None,
        Rival({"endpoints": 3, "tau": 10, "rho": 0.1}, why=_FL_BENCH_FLOCO),
    ),
    "flute": Method(
        {"collapse": 0.25, "head_decay": 0.0025, "feature_decay": 0.01, "head_epochs": 2},
        None,
        Rival(
            {"lamda1": 0.25, "lamda2": 0.0025, "lamda3": 0.0005, "rep_round": EPOCHS},
            EPOCHS + 2,
            why=_FL_BENCH_FLUTE,
            accuracy=_AS_PARAMETERS,
        ),
        examples=20,  # it sums the features of a batch, whose mean is ours with 20 times the weight
    ),
    "pefll": Method(
        {"rate": 0.001, "descriptor": 4, "examples": 20, "embedding_width": 32, "width": 32},
        None,
        Rival(
            {"hyper_embed_lr": 0.001, "embed_dim": 4, "hyper_hidden_dim": 32},
            why=_FL_BENCH_PEFLL,
        ),
        examples=20,  # one batch, from which both make a descriptor
    ),
}
