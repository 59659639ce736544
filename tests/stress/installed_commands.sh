# Every command of an installed Thinker, in a folder without a checkout. test_installed_commands.py runs it.
set -eux
thinker --version
thinker --help
thinker configs
python -c 'import thinker; print(thinker.__file__)'

# A text of one's own.
python - << 'END'
import random
from pathlib import Path

draw = random.Random(1)
words = "the cat sees a dog and a bird near an old house by the sea while rain falls on every leaf".split()
lines = []
for _ in range(6000):
    lines.append(" ".join(draw.choices(words, k=9)).capitalize() + ".")
Path("my.txt").write_text("\n".join(lines))
talk = '{"messages": [{"role": "user", "content": "Who is %d?"}, {"role": "assistant", "content": "A girl."}]}'
Path("talks.jsonl").write_text("\n".join(talk % number for number in range(200)))
END

thinker configs copy small-text mine.yaml
thinker plan mine.yaml data.path=my.txt model.d_model=64
thinker data mine.yaml data.path=my.txt --html data.html
SMALL="data.path=my.txt model.d_model=64 model.n_layers=2 train.eval_every=20 train.eval_sequences=16"
thinker train mine.yaml $SMALL run.dir=runs/mine train.max_steps=40 train.sample_every=20
thinker train runs/mine train.max_steps=60      # goes on
test -s runs/mine/loss.png -a -s runs/mine/report.html -a -s runs/mine/report.md
thinker train small-text $SMALL run.dir=runs/other run.seed=2 train.max_steps=60
thinker generate runs/mine --prompt "The cat" --max-new-tokens 20 --seed 1
thinker generate runs/mine --prompt "The cat" --max-new-tokens 20 --seed 1 --no-cache
thinker generate runs/mine --score my.txt | tail -3

thinker configs copy chat.jinja
thinker train finetune run.init_from=runs/mine data.path=talks.jsonl data.chat_template=chat.jinja \
    run.dir=runs/talks train.max_steps=30 train.batch_size=4
echo "Who is 7?" | thinker chat runs/talks --greedy --max-new-tokens 20

thinker eval runs/mine
thinker eval runs/mine --source text --path my.txt --max-tokens 3000 --json
thinker compare runs/mine runs/other
thinker sweep small-text $SMALL train.max_steps=10 --grid optimizer.lr=x0.5,x1 --seeds 2 --folder runs/sweep
thinker inspect attribute runs/mine --prompt "The cat sees" --png why.png
thinker inspect map runs/mine --prompt "The cat sees" --html map.html
thinker patterns 'window(4)' --length 8
thinker prune runs/mine --neurons 0.5 --texts 4 --out runs/pruned
thinker export hf runs/mine hf
thinker export gguf runs/mine mine.gguf --dtype q8_0
thinker generate hf --prompt "The cat" --max-new-tokens 5 --seed 1
thinker lessons
thinker lessons copy lessons
thinker benchmark linear_cross_entropy --vocab 1000 --device cpu --precision fp32

thinker serve runs/mine --port 0 2> server.log &
SERVER=$!
until grep -q "playground:" server.log; do kill -0 $SERVER; sleep 0.2; done
URL=$(sed -n 's/.*API: \(http[^ ]*\).*/\1/p' server.log)
curl -sf $URL/completions --json '{"model": "mine", "prompt": "The cat", "max_tokens": 5}'
kill -INT $SERVER
wait $SERVER
python page.py
set +x
echo "all commands ran"
