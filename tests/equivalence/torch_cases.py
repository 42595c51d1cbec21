"""Equivalence cases of what torch alone has: its modules, its loaders of data."""

import keras
import torch
from builders import X, Y, dense
from case import case
from keras import layers
from torch.utils.data import DataLoader, TensorDataset


def with_module():
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh()).double()
    return keras.Sequential([keras.Input([4]), layers.TorchModuleWrapper(module), layers.Dense(2)])


LOADER = DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=8)
CASES = {
    "module": case(with_module, X, Y, quick="graph"),
    "loader": case(dense, LOADER, quick="graph"),
}
