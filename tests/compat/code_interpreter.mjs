// The code interpreter through `@e2b/code-interpreter`: E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY lead to
// the server. Prints one line a check and ends with 1 if any failed. Run where the package can be resolved.
import assert from 'node:assert/strict'
import { Sandbox } from '@e2b/code-interpreter'

const checks = {
  async 'output and the last expression'(box) {
    const heard = []
    const execution = await box.runCode("import sys\nprint('out'); print('err', file=sys.stderr)\n'end'", {
      onStdout: (message) => heard.push(message.line),
      onResult: (result) => heard.push(result.text),
    })
    assert.equal(execution.text, 'end')
    assert.deepEqual(execution.logs, { stdout: ['out\n'], stderr: ['err\n'] })
    assert.deepEqual(heard, ['out\n', 'end'])
    assert.equal(typeof execution.executionCount, 'number')
  },
  async 'an error with its traceback'(box) {
    const { error } = await box.runCode('1 / 0')
    assert.equal(error.name, 'ZeroDivisionError')
    assert.equal(error.value, 'division by zero')
    assert.match(error.traceback, /1 \/ 0/)
  },
  async 'a figure: picture and chart'(box) {
    const code = "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2])\nplt.show()"
    const [figure] = (await box.runCode(code)).results
    assert.match(figure.png, /^iVBOR/)
    assert.equal(figure.chart.type, 'bar')
    assert.deepEqual(figure.chart.elements.map((bar) => bar.label), ['a', 'b'])
  },
  async 'a table: its data, with null for no value'(box) {
    const [table] = (await box.runCode("import pandas as pd\npd.DataFrame({'a': [1, None]})")).results
    assert.deepEqual(table.data, { a: [1, null] })
    assert.match(table.html, /<table/)
  },
  async 'contexts keep apart, restart, go'(box) {
    const one = await box.createCodeContext()
    const two = await box.createCodeContext({ cwd: '/tmp', language: 'python' })
    await box.runCode('x = 1', { context: one })
    assert.equal((await box.runCode('x', { context: two })).error.name, 'NameError')
    assert.equal((await box.runCode('import os; os.getcwd()', { context: two })).text, '/tmp')
    assert.deepEqual((await box.listCodeContexts()).slice(-2).map((context) => context.id), [one.id, two.id])
    await box.restartCodeContext(one)
    assert.equal((await box.runCode('x', { context: one })).error.name, 'NameError')
    await box.removeCodeContext(one)
    await box.removeCodeContext(two)
    await assert.rejects(box.removeCodeContext(one), /not found/)
    await assert.rejects(box.runCode('1', { language: 'cobol' }), { name: 'SandboxError' })
  },
  async 'bash, JavaScript and TypeScript'(box) {
    assert.deepEqual((await box.runCode('cd /tmp; pwd', { language: 'bash' })).logs.stdout, ['/tmp\n'])
    assert.equal((await box.runCode('await Promise.resolve(6 * 7)', { language: 'js' })).text, '42')
    assert.equal((await box.runCode("const x: string = 'typed'; x", { language: 'ts' })).text, 'typed')
  },
  async 'variables of one execution'(box) {
    const show = {
      python: "import os; print(os.environ.get('FOO', 'none'))",
      bash: 'echo ${FOO:-none}',
      js: "console.log(process.env.FOO ?? 'none')",
    }
    for (const [language, code] of Object.entries(show)) {
      assert.deepEqual((await box.runCode(code, { language, envs: { FOO: 'bar' } })).logs.stdout, ['bar\n'])
      assert.deepEqual((await box.runCode(code, { language })).logs.stdout, ['none\n'])
    }
  },
  async 'executions side by side'(box) {
    const contexts = await Promise.all([1, 2, 3].map(() => box.createCodeContext()))
    const code = (n) => `import time\nfor i in range(5):\n    print(${n}, flush=True); time.sleep(0.1)\n${n}`
    const executions = await Promise.all(contexts.map((context, n) => box.runCode(code(n), { context })))
    executions.forEach((execution, n) => {
      assert.equal(execution.text, String(n))
      assert.equal(execution.logs.stdout.join(''), `${n}\n`.repeat(5))
    })
  },
  async 'a client that gives up frees the kernel'(box) {
    await box.runCode('kept = 1')
    await assert.rejects(box.runCode('import time; time.sleep(300)', { timeoutMs: 2000 }), { name: 'TimeoutError' })
    const began = Date.now()
    assert.equal((await box.runCode('kept')).text, '1')
    assert.ok(Date.now() - began < 5000)
  },
}

const began = Date.now()
const box = await Sandbox.create({ timeoutMs: 300_000 })
assert.equal((await box.runCode('x = 20; x + 1')).text, '21')
console.log(`ok   create and the first result: ${Date.now() - began} ms`)
let failed = 0
try {
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check(box)
      console.log(`ok   ${name}`)
    } catch (error) {
      failed += 1
      console.log(`FAIL ${name}: ${String(error.message).split('\n').slice(0, 6).join(' | ')}`)
    }
  }
} finally {
  await box.kill()
}
console.log(`${Object.keys(checks).length + 1 - failed} passed, ${failed} failed`)
process.exitCode = failed ? 1 : 0
