// Every feature of a sandbox through the JavaScript SDK `e2b`: E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY lead to
// the server. Prints one line a check and ends with 1 if any failed. Run where the package can be resolved.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'
import { CommandExitError, FilesystemEventType, NotFoundError, Sandbox, Template, TimeoutError } from 'e2b'

const BOOT_ID = '/proc/sys/kernel/random/boot_id'

const checks = {
  async life() {
    const box = await Sandbox.create('base', { timeoutMs: 120_000, metadata: { check: 'life' }, envs: { FOO: 'b a r' } })
    try {
      const again = await Sandbox.connect(box.sandboxId, { timeoutMs: 300_000 })
      assert.equal((await again.commands.run('echo $FOO')).stdout, 'b a r\n')
      const info = await box.getInfo()
      assert.deepEqual([info.metadata, info.state, info.name], [{ check: 'life' }, 'running', 'base'])
      assert.ok(info.endAt - info.startedAt > 290_000)
      await box.setTimeout(30_000)
      assert.ok((await box.getInfo()).endAt - info.endAt < -200_000)
      assert.equal(await box.isRunning(), true)
    } finally {
      assert.equal(await box.kill(), true)
    }
    assert.equal(await box.isRunning(), false)
    await assert.rejects(Sandbox.connect(box.sandboxId), NotFoundError)
    await assert.rejects(Sandbox.create('no-such-template'), /not found/)
  },
  async lists() {
    const metadata = { run: randomUUID(), 'odd key': 'ü=&% +' }
    const boxes = []
    for (let made = 0; made < 3; made++) boxes.push(await Sandbox.create('base', { metadata }))
    await boxes[1].pause()
    const [first, second, third] = boxes.map((box) => box.sandboxId)
    assert.deepEqual(await ids({ query: { metadata } }), [third, second, first])
    assert.deepEqual(await ids({ query: { metadata, state: ['paused'] } }), [second])
    assert.deepEqual(await ids({ query: { metadata, state: ['running'] }, limit: 1 }), [third, first])
    for (const box of boxes) await box.kill()
    assert.deepEqual(await ids({ query: { metadata } }), [])
  },
  async commands() {
    await using(async (box) => {
      const options = { envs: { A: '1' }, cwd: '/tmp', user: 'root' }
      const result = await box.commands.run('echo out; echo err >&2; whoami; pwd', options)
      assert.deepEqual([result.stdout, result.stderr], ['out\nroot\n/tmp\n', 'err\n'])
      await assert.rejects(box.commands.run('exit 7'), (error) => error instanceof CommandExitError && error.exitCode === 7)
      await assert.rejects(box.commands.run('sleep 30', { timeoutMs: 1000 }), TimeoutError)
      const reader = await box.commands.run('cat', { background: true, stdin: true })
      await box.commands.sendStdin(reader.pid, 'line\n')
      await box.commands.closeStdin(reader.pid)
      assert.equal((await reader.wait()).stdout, 'line\n')
      const sleeper = await box.commands.run('sleep 300', { background: true })
      assert.ok((await box.commands.list()).some((process) => process.pid === sleeper.pid))
      assert.equal(await (await box.commands.connect(sleeper.pid)).kill(), true)
      await assert.rejects(sleeper.wait(), CommandExitError)
    })
  },
  async files() {
    await using(async (box) => {
      const written = await box.files.write('deep/er/file', 'text', { metadata: { origin: 'check' } })
      assert.deepEqual([written.path, written.metadata], ['/home/user/deep/er/file', { origin: 'check' }])
      const info = await box.files.getInfo('deep/er/file')
      assert.deepEqual([info.metadata, info.size, info.owner], [{ origin: 'check' }, 4, 'user'])
      await box.files.rename('deep/er/file', '/tmp/moved')
      assert.equal(await box.files.read('/tmp/moved'), 'text')
      const data = new Uint8Array(1 << 20).map((_, index) => index)
      await box.files.write('/tmp/blob', data.buffer)
      assert.deepEqual(await box.files.read('/tmp/blob', { format: 'bytes' }), data)
      assert.deepEqual((await box.files.list('deep', { depth: 2 })).map((entry) => entry.name), ['er'])
      await box.files.remove('deep')
      assert.equal(await box.files.exists('deep'), false)
      await assert.rejects(box.files.read('/tmp/none'), NotFoundError)
    })
  },
  async watching() {
    await using(async (box) => {
      await box.files.makeDir('/tmp/watched/below')
      const events = []
      const watch = await box.files.watchDir('/tmp/watched', (event) => events.push(event), { recursive: true })
      await box.files.write('/tmp/watched/below/new', '1')
      await until(() => events.length >= 3)
      const kinds = [FilesystemEventType.CREATE, FilesystemEventType.CHMOD, FilesystemEventType.WRITE]
      assert.deepEqual(events.map((event) => [event.type, event.name]), kinds.map((kind) => [kind, 'below/new']))
      await watch.stop()
    })
  },
  async terminal() {
    await using(async (box) => {
      let seen = ''
      const onData = (bytes) => (seen += Buffer.from(bytes).toString())
      const pty = await box.pty.create({ cols: 80, rows: 24, envs: { ABC: '123' }, cwd: '/', onData })
      await box.pty.resize(pty.pid, { cols: 99, rows: 10 })
      await box.pty.sendInput(pty.pid, new TextEncoder().encode('echo $ABC-$(tput cols)\nexit 0\n'))
      assert.equal((await pty.wait()).exitCode, 0)
      assert.match(seen, /123-99/)
    })
  },
  async 'pause and resume'() {
    await using(async (box) => {
      const sleeper = await box.commands.run('sleep 300', { background: true })
      const boot = await box.files.read(BOOT_ID)
      await box.pause()
      assert.deepEqual([await box.isRunning(), (await box.getInfo()).state], [false, 'paused'])
      await box.connect({ timeoutMs: 100_000 })
      assert.ok((await box.commands.list()).some((process) => process.pid === sleeper.pid))
      assert.equal(await box.files.read(BOOT_ID), boot)
      await box.files.write('/home/user/kept', 'kept')
      await box.pause({ keepMemory: false })
      await box.connect({ timeoutMs: 100_000 })
      assert.equal(await box.files.read('/home/user/kept'), 'kept')
      assert.notEqual(await box.files.read(BOOT_ID), boot)
    })
  },
  async 'pause instead of death'() {
    await using(
      async (box) => {
        await box.setTimeout(0)
        await until(async () => (await box.getInfo()).state === 'paused')
        assert.equal((await box.commands.run('echo awake')).stdout, 'awake\n')
      },
      { lifecycle: { onTimeout: 'pause', autoResume: true } }
    )
  },
  async snapshots() {
    await using(async (box) => {
      await box.files.write('/home/user/state', 'before')
      const { snapshotId } = await box.createSnapshot()
      await box.files.write('/home/user/state', 'after')
      const copy = await Sandbox.create(snapshotId, { timeoutMs: 60_000 })
      assert.equal(await copy.files.read('/home/user/state'), 'before')
      await copy.kill()
      assert.equal(await box.files.read('/home/user/state'), 'after')
      assert.equal(await Sandbox.deleteSnapshot(snapshotId), true)
      assert.equal(await Sandbox.deleteSnapshot(snapshotId), false)
    })
  },
  async forks() {
    await using(async (box) => {
      await box.files.write('/home/user/state', 'before')
      const children = await box.fork({ count: 2, timeoutMs: 60_000 })
      assert.equal(new Set([box, ...children].map((one) => one.sandboxId)).size, 3)
      for (const child of children) {
        assert.equal(await child.files.read('/home/user/state'), 'before')
        await child.kill()
      }
      assert.equal(await box.isRunning(), true)
    })
  },
  async templates() {
    const name = `check-${randomUUID().slice(0, 12)}`
    const recipe = Template().fromBaseImage().setEnvs({ SHOP: 'yard' }).runCmd('mkdir /opt/shop', { user: 'root' })
    const built = await Template.build(recipe.setWorkdir('/opt'), `${name}:v1`, { memoryMB: 256 })
    await Template.assignTags(`${name}:v1`, 'stable')
    for (const reference of [`${name}:v1`, `${name}:stable`, `${name}:${built.buildId}`]) {
      const box = await Sandbox.create(reference, { timeoutMs: 60_000 })
      assert.equal((await box.commands.run('echo $SHOP; pwd')).stdout, 'yard\n/opt\n')
      await box.kill()
    }
  },
  async metrics() {
    await using(async (box) => {
      await until(async () => (await box.getMetrics()).length > 0, 30_000)
      const sample = (await box.getMetrics()).at(-1)
      assert.ok(sample.memUsed > 0 && sample.memUsed < sample.memTotal)
    })
  },
}

async function using(work, options = {}) {
  const box = await Sandbox.create('base', { timeoutMs: 120_000, ...options })
  try {
    await work(box)
  } finally {
    await box.kill()
  }
}

async function ids(options) {
  const pages = Sandbox.list(options)
  const found = []
  while (pages.hasNext) found.push(...(await pages.nextItems()).map((info) => info.sandboxId))
  return found
}

async function until(isSo, milliseconds = 10_000) {
  for (const end = Date.now() + milliseconds; !(await isSo()); await sleep(100)) {
    assert.ok(Date.now() < end, `not so after ${milliseconds} ms`)
  }
}

let failed = 0
for (const [name, check] of Object.entries(checks)) {
  const began = Date.now()
  try {
    await check()
    console.log(`ok   ${name}: ${Date.now() - began} ms`)
  } catch (error) {
    failed += 1
    const where = /sdk\.mjs:(\d+)/.exec(error.stack ?? '')?.[1] ?? '?'
    console.log(`FAIL ${name}: line ${where}: ${error.name}: ${String(error.message).split('\n').slice(0, 6).join(' | ')}`)
  }
}
process.exit(failed ? 1 : 0)
