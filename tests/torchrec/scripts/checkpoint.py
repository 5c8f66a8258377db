"""Half of the steps, a checkpoint by torch.distributed.checkpoint, and the other half by a model that was loaded."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.torchrec.scripts.given import draws, fill

FEATURES = {"a": 20, "b": 30}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=8, num_embeddings=rows, feature_names=[name])
            for name, rows in FEATURES.items()
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.over = nn.Linear(16, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(kjt).values()).squeeze(1)


ELEMENTWISE = torch.optim.Adagrad  # its state is shaped like the tables, so columns may be cut


def SHARDED():
    """One table whole on a rank, columns of the other on both."""
    return {"t_a": table_wise(rank=1), "t_b": column_wise(ranks=[0, 1])}


def build(generators, kind=RowWiseAdagrad):
    """A model under a plan, and its optimizers."""
    model = fill(Net())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    apply_optimizer_in_backward(kind, model.ebc.parameters(), {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder()
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(model.ebc, generators, sharder, world, world, "cpu")
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    model = DistributedModelParallel(model, env, torch.device("cpu"), ShardingPlan({"ebc": plan}), [sharder])
    model.load_state_dict(weights)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.Adagrad(params, lr=0.1)
    )
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def run(model, optimizer, batches) -> list[float]:
    losses = []
    for _, ids, lengths, labels in batches:
        optimizer.zero_grad()
        logits = model(KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def state_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load(model, optimizer, folder: str) -> None:
    optimizer.init_state()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def resume(folder: str, steps: int, generators, kind=RowWiseAdagrad) -> list[float]:
    """The second half of the steps, from a checkpoint that either package wrote, under any plan."""
    model, optimizer = build(generators, kind)
    load(model, optimizer, folder)
    return run(model, optimizer, list(draws(FEATURES, 8, steps))[steps // 2 :])


def train(steps: int, folder: str | None = None) -> list[float]:
    generators = {"t_a": table_wise(rank=0), "t_b": table_wise(rank=0)}
    model, optimizer = build(generators)
    first = run(model, optimizer, list(draws(FEATURES, 8, steps))[: steps // 2])
    with tempfile.TemporaryDirectory() as own:
        dcp.save(state_of(model, optimizer), checkpoint_id=folder or own)
        return first + resume(folder or own, steps, generators)


def train_sharded(steps: int, folder: str):
    """On two ranks: what the checkpoint holds, and the losses after it."""
    from tests.torchrec.states import described

    model, optimizer = build(SHARDED(), ELEMENTWISE)
    batches = list(draws(FEATURES, 8, steps))
    run(model, optimizer, batches[: steps // 2])
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=folder)
    return {"state": described(state), "losses": run(model, optimizer, batches[steps // 2 :])}


def train_plain(steps: int):
    """The state of a model that no sharding touched."""
    model = fill(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(model, optimizer, list(draws(FEATURES, 8, steps)))
    return model.state_dict()
