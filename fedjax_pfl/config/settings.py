"""The settings of every run, whatever its method: their defaults, and what they mean."""

from typing import Any, NamedTuple


class Setting(NamedTuple):
    """A setting of every run."""

    default: Any  # or its type, where it is unset
    meaning: str


GENERAL: dict[str, dict[str, Setting]] = {
    "What is trained": {
        "algorithm": Setting("fedavg", "the method; its own settings lie under its name"),
        "model": Setting("small", "the network, likewise"),
        "keep_head": Setting(False, "the last layer stays with each client, whatever the method"),
        "groups": Setting(
            (), "settings of networks, as many as there are architectures; clients in turn"
        ),
        "phases": Setting(
            (), "settings that change in each part of a run; a part begins with what the one "
            "before has trained"
        ),
    },
    "Data": {
        "dataset": Setting("digits", "the examples; their own settings lie under their name"),
        "data_dir": Setting(str, "the folder of prepared tfds datasets; unset: TFDS_DATA_DIR"),
        "fraction": Setting(1.0, "share of the dataset that is used at all, drawn at random"),
        "partition": Setting("classes", "who holds what; its own settings lie under its name"),
        "partition_seed": Setting(0, "of all that is random in who holds what, apart from `seed`"),
        "split": Setting(
            "pooled", "where test examples come from: a part of each client's own (pooled), the "
            "dataset's own test set (official), or one part for all clients (shared)"
        ),
        "test_fraction": Setting(0.3, "share of examples for testing; official: not read"),
        "validation_fraction": Setting(
            0.0, "share for validation, by which a run's best round is chosen; 0: there is none"
        ),
        "validation_examples": Setting(
            int, "so many in place of the share, where split is official or shared"
        ),
        "permute_labels": Setting(False, "give every client a random numbering of the classes"),
        "augment": Setting(
            False, "random crops, flips, colours and gray in training; images only"
        ),
    },
    "Clients and rounds": {
        "clients": Setting(10, "how many the examples are given to"),
        "held_out": Setting(0, "so many of them, the last, are evaluated and do not train"),
        "participants": Setting("active", "who trains: active; in a later phase held_out"),
        "clients_per_round": Setting(int, "how many are drawn for a round; unset: all"),
        "rounds": Setting(50, "how often clients are drawn, train and upload"),
        "dropout": Setting(
            0.0, "chance that a client which has downloaded and trained is not heard of again"
        ),
    },
    "Local training": {
        "local_epochs": Setting(
            int, "passes over a client's own examples in a round; unset, as local_steps is: 1"
        ),
        "local_steps": Setting(int, "batches in a round instead, as many for every client"),
        "batch_size": Setting(32, "examples of a gradient step"),
        "drop_last": Setting(
            False, "leave out the short batch at the end of an epoch, unless it is the only one: "
            "with BatchNorm, which normalises by what is in a batch, one or two can cost accuracy"
        ),
        "learning_rate": Setting(0.01, "of the clients' SGD"),
        "learning_rate_drops": Setting(
            (), "shares of the rounds after each of which the rate falls to a tenth: .5,.75"
        ),
        "momentum": Setting(0.0, "of the clients' SGD"),
        "keep_momentum": Setting(False, "it stays with a client; else each round begins at 0"),
        "weight_decay": Setting(0.0, "added to the gradient, as a multiple of the parameters"),
        "clip_norm": Setting(float, "largest norm of a gradient; unset: any"),
    },
    "What travels": {
        "upload_bits": Setting(int, "of each number that is uploaded, 2 to 16; unset: all 32"),
        "upload_top_k": Setting(
            float, "share of an upload's numbers that is sent, the largest changes; unset: all"
        ),
        "max_update_norm": Setting(
            float, "largest norm of what an upload changes: a larger one is rejected, as one that "
            "is not finite always is; unset: any"
        ),
        "count_initial_download": Setting(True, "whether round 1's download is counted in bytes"),
    },
    "Evaluation": {
        "eval_every": Setting(5, "rounds between evaluations; a last round has one anyway"),
        "evaluate_after": Setting(
            True, "score each client's model after one more local training too, not only before"
        ),
        "validate_after": Setting(
            False, "choose a run's best round by the model after that training, not before it"
        ),
        "tensorboard": Setting(False, "write an event file for TensorBoard too"),
    },
    "Several runs": {
        "seed": Setting(
            0, "of all that is random in training: the first model, who is drawn, batches"
        ),
        "seeds": Setting(1, "so many seeds, from `seed` on, as one program"),
        "sweep": Setting(
            "", "values of real-valued settings, all combinations as one program: "
            "learning_rate=.1,.01; pfedla.rate=1,2"
        ),
    },
    "Memory and speed": {
        "checkpoint_every": Setting(int, "rounds between checkpoints; unset: by the clock"),
        "chunk": Setting(
            int, "clients that are computed together on a device; unset: 1 on a CPU, else all"
        ),
        "devices": Setting(
            int,
            "number of devices that clients are spread over; unset: all, on a CPU at most as many "
            "as clients in a round",
        ),
        "memory_gb": Setting(
            float, "GB of a device: chunk is chosen to fit, and a run that cannot is refused"
        ),
        "conv": Setting(
            "auto", "how convolutions are computed: auto, patches, rows, blocks, winograd or xla"
        ),
        "measure": Setting(
            False, "try which conv and chunk are fastest here, once for each kind of work"
        ),
    },
}  # fmt: skip
