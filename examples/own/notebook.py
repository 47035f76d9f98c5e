# A notebook as a script: Jupyter (jupytext), VS Code and Spyder open its cells. The last one may run again and again.

# %% An own feed-forward, in a cell
import torch.nn.functional as F
from torch import nn

import titanlite
from titanlite.build_llama import build_block


class SquaredReLU(nn.Module):
    def __init__(self, dim, ffn_dim):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, ffn_dim, bias=False), nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x_ND):
        return self.w2(F.relu(self.w1(x_ND)).square())


def block(model, layer):
    built = build_block(model, layer)
    built.feed_forward = SquaredReLU(model.dim, model.ffn_dim)
    return built


# %% The options: what the command line takes
options = ["debug", "--training.steps=2", "--training.seq_len=32", "--training.local_batch_size=2"]
options += ["--model.n_layers=2", "--validation.enable=false"]
print(titanlite.load(options).model.n_layers, "layers")

# %% Train twice: with titanlite's block, and with the own one
plain = titanlite.run([*options, "--job.dump_folder=outputs/plain"])
squared = titanlite.run([*options, "--job.dump_folder=outputs/squared"], own=titanlite.Own(block=block))
print(f"loss {plain.loss:.4f}, and {squared.loss:.4f} with squared ReLU")
