"""Stand-in for the server of FL-bench: reads the data and the split from a folder."""

import json
import pickle
import random

import torch
import torchvision
from src.utils.models import MODELS
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

FLBENCH_ROOT = HydraConfig = None


class FedAvgServer:
    def __init__(self, args):
        folder = FLBENCH_ROOT / "data" / args.dataset.name
        assert json.loads((folder / "args.json").read_text())["split"] == "sample"
        self.split = pickle.loads((folder / "partition.pkl").read_bytes())
        self.data = torchvision.datasets.CIFAR10(folder, True, False)
        self.args, self.model = args, MODELS[args.model.name](args.dataset.name, False)
        assert HydraConfig.get().runtime.output_dir
        clients = self.split["separation"]["train"]
        cohort = int(args.common.join_ratio * len(clients))
        rounds = range(args.common.global_epoch)
        self.client_sample_stream = [random.sample(clients, cohort) for _ in rounds]

    def train_one_round(self):
        common = self.args.common
        for role in (common.test.client, common.test.server):
            assert role.interval == -1
            assert {role.train, role.val, role.test, common.client_side_evaluation} == {False}
        optimizer, loss = SGD(self.model.parameters()), torch.nn.CrossEntropyLoss()
        for client in self.selected_clients:
            rows = self.split["data_indices"][client]["train"]
            x, y = self.data.data[rows], [self.data.targets[row] for row in rows]
            dataset = TensorDataset(torch.Tensor(*x.shape), torch.Tensor(len(y)))
            for _ in range(common.local_epoch):
                for batch in DataLoader(dataset, common.batch_size):
                    loss(*batch)
                    optimizer.step()
