"""pFedHN and pFedHN-PC: a hypernetwork on the server generates every client's model.

Shamsian et al., Personalized Federated Learning using Hypernetworks, 2021. With v_i the embedding
of client i, h(·; φ) the hypernetwork and J = ∂θ_i / ∂(φ, v):

  θ_i    = h(v_i; φ),  θ̃_i = local training from θ_i        (Algorithm 1)
  g      = Jᵀ (θ_i − θ̃_i), clipped over φ and all of v together
  m      ← .9 m + (g + decay · (φ, v))
  (φ, v) ← (φ, v) − η m

In PC (4) θ_i is all but the last layer; ω_i, the last one, is trained together with it and stays
with the client, and so does its momentum.

Deviations: Algorithm 1 subtracts Jᵀ (θ̃_i − θ_i), which leads away, in every local step; this is the
authors' code, once for each visit and towards θ̃_i. Clipping, momentum and decay are the code's too.
Its gradient of v is dense: momentum and decay also move clients that were not sampled, if they are
active. ω_i learns at the clients' rate, unclipped. BatchNorm's statistics stay with the clients.
An embedding has 100 numbers at most, unless another length is set; the code's have 1 + N // 4.
"""

from typing import Any

from fedjax_pfl.algorithms.hypernetwork import generated
from fedjax_pfl.algorithms.hypernetwork_settings import Settings, with_settings
from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.local_training import Training
from fedjax_pfl.core.task import Task


@with_settings(rate=1e-2)
def pfedhn(
    models: Any, task: Task, training: Training, federation: Federation, settings: Settings
) -> Algorithm:
    """pFedHN: one hypernetwork generates the whole of every client's model.

    `models`: a network, or one for each group of clients: all from one hypernetwork.
    """
    return generated("pfedhn", models, task, training, federation, settings, keep_head=False)


@with_settings(rate=5e-2)
def pfedhn_pc(
    models: Any, task: Task, training: Training, federation: Federation, settings: Settings
) -> Algorithm:
    """pFedHN-PC: pFedHN of all but the last layer, which stays with the client.

    `models`: a network, or one for each group of clients: all from one hypernetwork.
    """
    return generated("pfedhn_pc", models, task, training, federation, settings, keep_head=True)
