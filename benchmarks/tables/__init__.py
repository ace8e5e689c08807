"""The paper's tables on an embedded world, all methods in one run: `python -m benchmarks.tables --world portraits`.

Table 1 compares methods, Table 2 gradient sources of SCE-LITE-HQ, Table 3 cost. Every method is tuned with the same
budget: as many settings, its own defaults among them, on as many pictures, chosen by the same score. Counterfactuals
are judged by the student's evaluator, never by a guide, on the same pictures and seeds for all.

Every batch, trial, repair and timing is on the disk as soon as it is done; a run that was killed goes on from there. A
row that cannot run, for want of weights or because its method breaks, stands in the tables with the reason.
`NAME@latent` runs a method on the world's latent prior instead of its own pixel-space diffusion.

    plan           rows, candidates of calibration          figures    Tables 1 and 2 in numbers
    paper          the paper's numbers                       cost       Table 3 in numbers
    case           what is compared, counterfactuals         printing   Markdown, CSV, JSON, picture grid
    calibration    the best candidate of a method            __main__   the command

How long N = 100 takes for one world, a model from counted calls and not a measurement. A row makes 284 counterfactuals:
200 for Table 1 (K = 2), 72 for calibration (6 settings, 12 pictures), 12 for Table 3. CPU seconds of one thread per
picture: network 0.006 (portraits), 0.008 (histology) and 0.012 (pixels); with its backward pass 0.012, 0.016 and 0.024;
gradient of classifier and decoder 0.023, 0.017 and 0.003. Two threads are taken to be 1.6 times as fast. Ranges are
from one try to all tries of every picture.

                  calls of the network in one try     pixel-space prior    latent prior
    sce-lite-hq   18, twice, and up to 37 harmonising                      4 to 12 min
    fastdime      60                                  3 to 8 min           5 to 15 min
    fastdime-2    120, 2+ likewise                    5 to 16 min          10 to 30 min
    dime          1830                                1.1 to 3.3 h         0.6 to 2.3 h
    ace           255, 250 of them back-propagated    18 min               15 min
    sce           1000 back-propagated, up to         1.2 to 1.8 h         0.7 to 1.0 h
                  1000 more for repainting
    diffeocf      none, up to 500 gradients                                up to 35 min
    dive          none, 20 to 80 gradients                                 1 to 5 min

The gain adds 3 fine-tunings, about 3 min, to each row. Table 2 makes 1600 more counterfactuals of SCE-LITE-HQ, some by
72 gradients a step: 1 to 2 h. With --short DiME executes 15 steps (120 calls: 4 to 13 min on pixels), ACE half and SCE
a quarter of their calls.
"""
