"""Settings that every run has, with any method.

Each transform defines its settings in its own file.
"""

import functools

from fedjax_pfl import transforms
from fedjax_pfl.core.optimizers import OPTIMIZERS, SCHEDULES
from fedjax_pfl.core.setting import Limits, Role, Setting, UsedWith
from fedjax_pfl.settings.stragglers import STRAGGLERS
from fedjax_pfl.simulation import programs

STORES = ("auto", *programs.STORES)

_BUILTIN = tuple(OPTIMIZERS)  # a user-defined optimiser contains its learning rate
_HYPERPARAMETER: frozenset[Role] = frozenset({"per_phase", "tunable"})
_DATA: frozenset[Role] = frozenset({"defines_data"})
_MACHINE: frozenset[Role] = frozenset({"resumable"})
_hyperparameter = functools.partial(Setting, roles=_HYPERPARAMETER)
_data = functools.partial(Setting, roles=_DATA)
_machine = functools.partial(Setting, roles=_MACHINE)

SETTING_GROUPS: dict[str, dict[str, Setting]] = {
    "Method and model": {
        "algorithm": Setting(
            "fedavg",
            "Federated learning method. Its settings are in the group of its name.",
            roles={"per_phase", "basic"},
        ),
        "model": Setting(
            "small",
            "Network. Its settings are in the group of its name.",
            roles={"per_phase", "basic"},
        ),
        "task": Setting("auto", "Learning task; auto: inferred from the type of the labels."),
        "metrics": Setting(
            "",
            "Metrics to report, such as accuracy,macro_f1. The first one selects the best "
            "round. Unset: the metrics of the task.",
        ),
        "zero_head": Setting(
            False,
            "Initialise the last layer of a new model with zeros, which prefers no order of the "
            "labels. A phase that starts from a trained model keeps its layer.",
            roles={"per_phase"},
        ),
        "initial_weights": Setting(
            "",
            "File with the state_dict of a PyTorch network, in safetensors, that the network "
            "starts with. Unset: random.",
        ),
        "groups": Setting(
            (),
            "Network settings of each client group, one entry per architecture. Clients are "
            "assigned to groups in turn.",
        ),
        "phases": Setting(
            (),
            "Settings that change in each phase of a run. A phase starts from the state of "
            "the previous phase.",
        ),
    },
    "Data": {
        "dataset": _data(
            "digits",
            "Dataset. Its settings are in the group of its name.",
            roles={*_DATA, "basic"},
        ),
        "data_dir": _machine(
            str,
            "Directory of prepared tfds datasets; unset: TFDS_DATA_DIR.",
            roles={*_MACHINE, "per_process"},
        ),
        "fraction": _data(
            1.0,
            "Fraction of the dataset to use, sampled at random.",
            limits=Limits(above=0, high=1),
        ),
        "partition": _data(
            "classes",
            "Split of the examples between clients. Its settings are in the group of its name, "
            "such as classes.per_client.",
            roles={*_DATA, "basic"},
        ),
        "partition_seed": _data(
            0, "Seed of the partition, independent of seed.", limits=Limits(low=0)
        ),
        "split": _data(
            "pooled",
            "Source of the test examples: part of each client's examples (pooled), the "
            "dataset's test set (official), or one test set for all clients (shared).",
            choices=("pooled", "official", "shared"),
        ),
        "test_fraction": _data(
            0.3,
            "Fraction of examples for testing. Ignored if split is official.",
            limits=Limits(low=0, below=1),
        ),
        "validation_fraction": _data(
            0.0,
            "Fraction of examples for validation, which selects the best round of a run; 0: "
            "no validation.",
            limits=Limits(low=0, below=1),
        ),
        "validation_examples": _data(
            int,
            "Number of validation examples, instead of the fraction, if split is official or "
            "shared.",
            limits=Limits(low=1),
        ),
        "permute_labels": _data(False, "Permute the class labels of every client at random."),
        "augment": Setting(
            False, "Random crops, flips, colours and grayscale during training; images only."
        ),
    },
    "Clients and rounds": {
        "clients": _data(10, "Number of clients.", limits=Limits(low=1), roles={*_DATA, "basic"}),
        "held_out": _data(
            0,
            "Number of clients, the last ones, that train only in a phase with "
            "participants=held_out. They are evaluated too, unless evaluate_clients is set.",
            limits=Limits(low=0),
        ),
        "participants": Setting(
            "active",
            "Clients that train: active, or held_out in a later phase.",
            roles={"per_phase"},
            choices=("active", "held_out"),
        ),
        "clients_per_round": Setting(
            int,
            "Number of clients sampled per round; unset: all.",
            limits=Limits(low=1),
            roles={"per_phase", "sets_participation"},
        ),
        "rounds": Setting(
            50,
            "Number of federated rounds.",
            limits=Limits(low=1),
            roles={"per_phase", "budget", "sets_participation", "basic"},
        ),
        "sampling": Setting(
            "random",
            "How clients are sampled: random, or cyclic: all in turn, in an order drawn once.",
            roles={"per_phase"},
            choices=("random", "cyclic"),
        ),
        "dropout": Setting(
            0.0,
            "Probability that a sampled client never returns its update.",
            limits=Limits(low=0, below=1),
        ),
        **STRAGGLERS,
    },
    "Local training": {
        "local_epochs": _hyperparameter(
            int,
            "Passes over the client's examples per round; unset, with local_steps unset too: 1.",
            limits=Limits(low=1),
            roles={*_HYPERPARAMETER, "basic"},
        ),
        "local_steps": _hyperparameter(
            int,
            "Gradient steps per round, the same number for every client; replaces local_epochs.",
            limits=Limits(low=1),
        ),
        "batch_size": _hyperparameter(
            32,
            "Examples per gradient step.",
            limits=Limits(low=1),
            roles={*_HYPERPARAMETER, "basic"},
        ),
        "drop_last": _hyperparameter(
            False,
            "Drop the smaller last batch of an epoch, unless it is the only one. BatchNorm "
            "over one or two examples can cost accuracy.",
            used_with=UsedWith("local_steps", (None,)),
        ),
        "optimizer": _hyperparameter(
            "sgd", "Optimiser of the clients: sgd, adam, adamw, adagrad or rmsprop, as in optax."
        ),
        "learning_rate": _hyperparameter(
            0.01,
            "Learning rate of the clients.",
            limits=Limits(above=0),
            roles={*_HYPERPARAMETER, "sweepable", "basic"},
            used_with=UsedWith("optimizer", _BUILTIN),
        ),
        "learning_rate_schedule": _hyperparameter(
            "constant",
            "Schedule that scales learning_rate, as in optax.schedules: constant, linear, "
            "cosine_decay, exponential_decay, warmup_constant or warmup_cosine_decay.",
            choices=("constant", *SCHEDULES),
            used_with=UsedWith("optimizer", _BUILTIN),
        ),
        "schedule_over": _hyperparameter(
            "rounds",
            "Length of the schedule: the rounds of a phase or the local steps of one client "
            "update.",
            choices=("rounds", "steps"),
            used_with=UsedWith("learning_rate_schedule", tuple(SCHEDULES)),
        ),
        "schedule_end": _hyperparameter(
            0.01,
            "Factor of learning_rate at the end of the schedule, and at the start of a warm-up.",
            limits=Limits(low=0, high=1),
            used_with=UsedWith("learning_rate_schedule", tuple(SCHEDULES)),
        ),
        "schedule_warmup": _hyperparameter(
            0.1,
            "Fraction of the schedule for the warm-up, where the rate rises to learning_rate.",
            limits=Limits(low=0, below=1),
            used_with=UsedWith(
                "learning_rate_schedule", ("warmup_constant", "warmup_cosine_decay")
            ),
        ),
        "learning_rate_drops": Setting(
            (),
            "Fractions of the rounds after which the learning rate is divided by 10, such as "
            "0.5,0.75.",
            roles={"per_phase"},
            used_with=UsedWith("optimizer", _BUILTIN),
        ),
        "momentum": _hyperparameter(
            0.0,
            "Momentum of the clients' sgd or rmsprop.",
            limits=Limits(low=0, below=1),
            roles={*_HYPERPARAMETER, "sweepable", "zero_is_special"},
            used_with=UsedWith("optimizer", ("sgd", "rmsprop")),
        ),
        "b1": _hyperparameter(
            0.9,
            "Decay rate of the first moment of adam and adamw.",
            limits=Limits(low=0, below=1),
            used_with=UsedWith("optimizer", ("adam", "adamw")),
        ),
        "b2": _hyperparameter(
            float,
            "Decay rate of the second moment; unset: 0.999, or 0.9 with rmsprop.",
            limits=Limits(low=0, below=1),
            used_with=UsedWith("optimizer", ("adam", "adamw", "rmsprop")),
        ),
        "eps": _hyperparameter(
            float,
            "Constant added to the second moment or its root, as in optax; unset: the default"
            " of optax.",
            limits=Limits(above=0),
            used_with=UsedWith("optimizer", ("adam", "adamw", "adagrad", "rmsprop")),
        ),
        "keep_optimizer": _hyperparameter(
            False,
            "Keep the optimiser state on the client between rounds. False: each round starts "
            "with a new state.",
        ),
        "weight_decay": _hyperparameter(
            0.0,
            "Factor of the parameters that sgd adds to the gradient and adamw to its step.",
            limits=Limits(low=0),
            roles={*_HYPERPARAMETER, "sweepable", "zero_is_special"},
            used_with=UsedWith("optimizer", ("sgd", "adamw")),
        ),
        "decay_vectors": _hyperparameter(
            True,
            "Apply weight decay to vectors too: biases, and scales and shifts of normalisations.",
            used_with=UsedWith("optimizer", ("sgd", "adamw")),
        ),
        "clip_norm": _hyperparameter(
            float,
            "Largest norm of a gradient; unset: unlimited.",
            limits=Limits(above=0),
            roles={*_HYPERPARAMETER, "sweepable"},
        ),
    },
    "Uploads and the server": {
        "max_update_norm": Setting(
            float,
            "Largest norm of an accepted update. Updates that are larger or not finite are "
            "rejected. Unset: updates are rejected from norm 1.8e19 on, where the squared "
            "norm overflows.",
            limits=Limits(above=0),
        ),
        "count_initial_download": Setting(True, "Count the download of round 1 as traffic."),
    },
    "Evaluation": {
        "eval_every": Setting(
            5,
            "Rounds between evaluations. The last round is always evaluated.",
            limits=Limits(low=1),
        ),
        "evaluate_clients": Setting(
            int,
            "Number of participating honest clients to evaluate, sampled once with "
            "partition_seed. Unset: all; with more than 10,000 clients, half as many as there are "
            "client updates between two evaluations.",
            limits=Limits(low=1),
            roles={"per_phase"},
        ),
        "evaluate_after": Setting(
            True, "Evaluate each client's model also after one more local training."
        ),
        "validate_after": Setting(
            False,
            "Select the best round by validation accuracy after local fine-tuning instead of "
            "before.",
        ),
        "reference": _machine(
            False,
            "Also run Local and FedAvg on the same data, and report whether the method helped.",
        ),
        "reference_runs": _machine(
            "",
            "Directories of finished reference runs on the same data, separated by commas. "
            "The report compares with them, and with runs of Local and FedAvg in neighbouring"
            " directories.",
        ),
        "log_to": _machine(
            "",
            "Copy the evaluations to tensorboard, wandb or mlflow, several separated by commas. "
            "They write to the run directory.",
        ),
    },
    "Several runs": {
        "seed": Setting(
            0,
            "Seed of training: initial parameters, client sampling and batches.",
            limits=Limits(low=0),
            roles={"budget", "basic"},
        ),
        "seeds": Setting(
            1,
            "Number of seeds, starting from seed, that run as one program.",
            limits=Limits(low=1, high=1000),
            roles={"budget"},
        ),
        "own_partitions": Setting(
            False,
            "Each of seeds has its own partition: partition_seed grows with seed. They run as one "
            "program if each client has the same number of examples in all.",
        ),
        "sweep": Setting(
            "",
            "Values of real-valued settings. All combinations run as one program, such as "
            "learning_rate=0.1,0.01; pfedla.rate=1,2. The values are float32, so rounding may"
            " differ from a single run.",
        ),
    },
    "Memory and speed": {
        "checkpoint_every": _machine(
            int,
            "Rounds between checkpoints; unset: by elapsed time.",
            limits=Limits(low=1),
        ),
        "chunk": _machine(
            int,
            "Number of clients computed together on a device; unset: 1 on CPU, all otherwise.",
            limits=Limits(low=1),
        ),
        "devices": _machine(
            int,
            "Number of devices to spread clients over; unset: all, on CPU at most the number "
            "of clients per round.",
            limits=Limits(low=1),
        ),
        "store": _machine(
            "auto",
            "Storage of examples and state. device: everything on every device. sharded: "
            "client state spread over devices. host, disk: client state off the devices, "
            "loaded for each round's cohort. auto: the first of these that fits well.",
            choices=STORES,
        ),
        "memory_gb": _machine(
            float,
            "Memory of a device in GB. Chooses chunk to fit; a run that cannot fit is refused.",
            limits=Limits(above=0),
        ),
        "conv": _machine(
            "auto",
            "Implementation of convolutions: auto, patches, rows, blocks, winograd, xla, or fused "
            "(GPU only).",
            choices=("auto", "patches", "rows", "blocks", "winograd", "xla", "fused"),
        ),
    },
}

for selectable in transforms.REGISTRY:
    SETTING_GROUPS.setdefault(selectable.title, {}).update(selectable.settings)
SETTINGS = {name: setting for group in SETTING_GROUPS.values() for name, setting in group.items()}


def settings_with(role: Role) -> tuple[str, ...]:
    """Returns the names of the settings with a role, such as "resumable"."""
    return tuple(name for name, setting in SETTINGS.items() if role in setting.roles)
