"""The paper's tables on an embedded world, all methods side by side: `python -m benchmarks.tables --world portraits`.

Table 1 compares methods, Table 2 gradient sources of SCE-LITE-HQ, Table 3 cost. Every method is tuned with the same
budget: as many settings, its own defaults among them, on as many pictures, chosen by the same score. Counterfactuals
are judged by the student's evaluator, never by a guide, as pictures of 8 bits, on the same pictures and seeds for all.

Every batch, trial, repair and timing is on the disk as soon as it is done; a run that was killed goes on from there.
What is finished is kept as a record beside the results, so that the next run, on whatever machine, measures only what
is missing: `--methods NAME …` measures these rows and shows all that are on record, `--methods` alone only shows them.
A row that cannot run, for want of weights or because its method breaks, stands in the tables with the reason.
`NAME@latent` runs a method on the world's latent prior instead of its own pixel-space diffusion.

    plan             rows, candidates of calibration          figures     Tables 1 and 2 in numbers
    paper            the paper's numbers                       cost        Table 3 in numbers
    case             what is compared                          filling     rows from records, or measured
    calibration      the best candidate of a method            records     what is kept from run to run
    counterfactuals  each made once, kept with its picture     attributes  what sparsity is measured in, and its worth
    network          the pixel-space network on ONNX Runtime   printing    Markdown, CSV, JSON, picture grid

How long N = 100 takes for one world and one thread, as a model from counted calls. A row makes 240 counterfactuals: 200
for Table 1 (K = 2) and 40 for calibration. A call of the pixel-space network took 0.012 s a picture alone on 2 cores,
and 0.033 s with its backward pass beside another such process.

                  calls of the network in one try     about
    fastdime      60 to 100                           15 min
    fastdime-2    120 to 200, 2+ likewise             30 min
    ace           255 or 510, nearly all of them      35 to 70 min
                  back-propagated
    sce           20 to 1000 back-propagated, up to   1 to 2 h
                  as many more for repainting
    dime          820 to 3240                         1 to 4 h
    sce-lite-hq, dive, diffeocf                       2 to 10 min

The gain adds 5 to 20 fine-tunings, about 2 to 8 min, to each row. With --short DiME executes 15 steps (120 calls), ACE
half and SCE a quarter of their calls.
"""
