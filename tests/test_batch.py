"""`RewardBatch`: what it derives, what it refuses, and the views that strategies show each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.advantages.table import batch_of
from trl_grpo_ext.batch import RewardBatch
from trl_grpo_ext.errors import ShapeError

NAN, INF = float("nan"), float("inf")


class TestDerived:
    def test_scores_are_the_weighted_sum_of_what_was_scored(self):
        batch = batch_of([[1.0, 10.0], [2.0, NAN], [INF, 30.0], [NAN, -INF]], weights=[1.0, 0.5])
        assert batch.scores.nan_to_num(-1).tolist() == [6.0, 2.0, 15.0, -1.0]
        assert batch.scores.dtype == torch.float32

    def test_scores_of_a_complete_batch(self):
        assert batch_of([[1.0, 10.0], [2.0, 4.0]], weights=[1.0, 0.5]).scores.tolist() == [6.0, 4.0]

    def test_scores_saturate(self):
        largest = torch.finfo(torch.float32).max
        assert batch_of([[largest, largest], [-largest, -largest]]).scores.tolist() == [largest, -largest]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_summed_exactly(self, dtype):
        batch = batch_of(torch.tensor([[256.0, 0.125]], dtype=dtype))
        assert batch.scores.tolist() == [256.125]

    def test_groups(self):
        assert batch_of([0.0] * 6, 3).groups.tolist() == [0, 0, 0, 1, 1, 1]


class TestShapes:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"rewards": torch.zeros(4)}, r"`rewards` must be \(N, F\), got shape \(4,\)"),
            ({"weights": torch.ones(2)}, r"`weights` must have shape \(1,\)"),
            ({"lengths": torch.ones(3)}, r"`lengths` must have shape \(4,\)"),
            ({"truncated": torch.ones(5)}, r"`truncated` must have shape \(4,\)"),
            ({"names": ("a", "b")}, "`names` must name 1 reward functions, got 2"),
            ({"num_generations": 3}, "4 rows do not divide by num_generations=3"),
            ({"num_generations": 0}, "num_generations=0"),
            ({"prompts": ["x"]}, "`prompts` must hold 4 entries, got 1"),
            ({"rewards": [[0.0]] * 4}, "`rewards` must be a tensor, got list"),
            ({"lengths": np.ones(4)}, "`lengths` must be a tensor, got ndarray"),
            ({"weights": None}, "`weights` must be a tensor, got NoneType"),
            ({"num_generations": "4"}, "`num_generations` must be an integer, got '4'"),
            ({"num_generations": None}, "`num_generations` must be an integer, got None"),
            ({"num_generations": 4.0}, r"`num_generations` must be an integer, got 4\.0"),
        ],
        ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
    )
    def test_are_checked(self, change, message):
        fields = {
            "rewards": torch.zeros(4, 1),
            "weights": torch.ones(1),
            "lengths": torch.ones(4),
            "truncated": torch.zeros(4),
            "num_generations": 2,
            "names": ("a",),
        }
        with pytest.raises(ShapeError, match=message):
            RewardBatch(**{**fields, **change})


class TestViews:
    batch = batch_of(
        [[0.0, 5.0], [2.0, NAN], [10.0, 7.0], [14.0, INF]], 2, names=["first", "second"], weights=[1.0, 3.0]
    )

    def test_evaluation(self):
        view = self.batch.evaluation
        assert self.batch.training
        assert not view.training
        assert view.evaluation is view
        assert torch.equal(view.scores, self.batch.scores)

    def test_column(self):
        view = self.batch.column(1)
        assert view.names == ("second",)
        assert view.weights.tolist() == [1.0]
        assert view.scores.nan_to_num(-1).tolist() == [5.0, -1.0, 7.0, -1.0]
        assert view.cells.shape == (4, 1)
        assert view.training
        assert torch.equal(view.groups, self.batch.groups)

    def test_refined(self):
        view = self.batch.refined(torch.tensor([0, 1, 1, 0]))
        assert view.groups.tolist() == [0, 1, 1, 0]
        assert torch.equal(view.scores, self.batch.scores)
        assert view.rows.size == 2
        assert view.column(0).groups.tolist() == [0, 1, 1, 0]

    def test_refined_and_centred_by_group(self):
        view = self.batch.refined(torch.zeros(4, dtype=torch.int64), centred=True)
        # Scores 15, 2 | 31, 14: minus 8.5 and 22.5
        assert view.scores.tolist() == [6.5, -6.5, 8.5, -8.5]
        assert view.column(0).scores.tolist() == [-1.0, 1.0, -2.0, 2.0]
        # A column's groups of one scored row are constant
        assert view.column(1).scores.nan_to_num(-1).tolist() == [0.0, -1.0, 0.0, -1.0]

    def test_the_batch_itself_stays_as_it_was(self):
        self.batch.refined(torch.zeros(4, dtype=torch.int64), centred=True)
        assert self.batch.groups.tolist() == [0, 0, 1, 1]
        assert self.batch.scores.tolist() == [15.0, 2.0, 31.0, 14.0]
        assert self.batch.num_generations == 2
