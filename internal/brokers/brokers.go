// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package brokers

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A Kind is a kind of broker.
type Kind string

// The kinds that scripts/brokers knows.
const (
	Kafka     Kind = "kafka"
	RabbitMQ  Kind = "rabbitmq"  // 3.x
	RabbitMQ4 Kind = "rabbitmq4" // 4.x; needs root
	NATS      Kind = "nats"
	Redis     Kind = "redis" // not a broker, but started and killed like one
	Etcd      Kind = "etcd"
	Postgres  Kind = "postgres"
)

// ErrLeftOut means that this machine cannot run the kind: it has no root, or a package is
// missing. The error's text says what would help.
var ErrLeftOut = errors.New("brokers: left out")

// Env returns the name of the environment variable that sets the address for Find.
func (k Kind) Env() string { return "STORMGUARD_" + strings.ToUpper(string(k)) }

// Find returns the address of a broker that several programs may share: the value of
// k.Env(), or else the address of the default instance. Find starts that instance if it
// does not run, and leaves it running. See [Broker.Addr] for the format.
func Find(ctx context.Context, k Kind) (addr string, err error) {
	if addr := os.Getenv(k.Env()); addr != "" {
		return addr, nil
	}
	return script(ctx, "start", string(k))
}

// Options are the options of an instance. The zero value is one node, under a name that no
// other instance has.
type Options struct {
	// Name is the instance's name: 1 to 40 of A-Z a-z 0-9 . _ -. An existing instance is
	// taken over, with its data.
	Name string
	// Nodes is the number of Kafka nodes, 1 to 5; default 1. Other kinds have one node.
	Nodes int
	// Set is added to the broker's configuration: server.properties, rabbitmq.conf or the
	// server's configuration file. {NAME} in a value becomes a port, for more listeners.
	// node1 is the port in Addr. Any other name is a free port, which Info returns.
	Set map[string]string
}

// A Broker is an instance that Start made. It ends with Stop. If this process dies before
// that, the next start of any broker ends it.
type Broker struct {
	kind Kind
	name string
	addr string
	args []string
}

// Start makes an instance for the caller alone. It ignores k.Env().
func Start(ctx context.Context, k Kind, o Options) (*Broker, error) {
	if o.Name == "" {
		o.Name = fmt.Sprintf("own-%d-%s", os.Getpid(), strings.ToLower(rand.Text()[:6]))
	}
	b := &Broker{kind: k, name: o.Name}
	b.args = []string{"start", string(k), "--name", o.Name, "--temp", "--while", strconv.Itoa(os.Getpid())}
	if o.Nodes != 0 {
		b.args = append(b.args, "--nodes", strconv.Itoa(o.Nodes))
	}
	for _, key := range slices.Sorted(maps.Keys(o.Set)) {
		b.args = append(b.args, "--set", key+"="+o.Set[key])
	}
	if err := b.Restart(ctx); err != nil {
		// Not ctx: its end may be why the start failed.
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		return nil, errors.Join(err, b.Stop(stop))
	}
	return b, nil
}

// Addr returns host:port for Kafka, comma-separated for several nodes, and a URL for the
// others: amqp://user:password@host:port/, nats://host:port, redis://host:port,
// http://host:port or postgres://user@host:port/database. It stays the same until Stop.
func (b *Broker) Addr() string { return b.addr }

// Name returns the instance's name, which is unique among instances of its kind.
func (b *Broker) Name() string { return b.name }

// Kill ends a node like a crash: kill -9. Nodes count from 1; 0 means all. When Kill
// returns the process is gone. Data and ports stay.
func (b *Broker) Kill(ctx context.Context, node int) error {
	args := []string{"kill", string(b.kind), "--name", b.name}
	if node != 0 {
		args = append(args, "--node", strconv.Itoa(node))
	}
	_, err := script(ctx, args...)
	return err
}

// Restart starts the nodes that do not run, and returns when they are ready.
func (b *Broker) Restart(ctx context.Context) error {
	addr, err := script(ctx, b.args...)
	if err == nil {
		b.addr = addr
	}
	return err
}

// Stop ends all nodes at once and deletes their data. A second Stop does nothing.
func (b *Broker) Stop(ctx context.Context) error {
	_, err := script(ctx, "stop", string(b.kind), "--name", b.name, "--wipe")
	return err
}

// Info returns the properties of the instance that scripts/brokers knows. Keys are address,
// version, directory, nodes, up (the number of running nodes), pid1 and log1 and so on for
// each node, and port_NAME for each port. RabbitMQ also has management, the URL of its HTTP
// API.
func (b *Broker) Info(ctx context.Context) (map[string]string, error) {
	out, err := script(ctx, "info", string(b.kind), "--name", b.name)
	if err != nil {
		return nil, err
	}
	info := make(map[string]string)
	for line := range strings.Lines(out) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		info[key] = value
	}
	return info, nil
}

// Version returns the name and version of the running broker, such as "Kafka 4.3.1".
func (b *Broker) Version(ctx context.Context) (string, error) {
	info, err := b.Info(ctx)
	return info["version"], err
}

// Ctl runs rabbitmqctl against the instance and returns its output. It takes about 2 s.
// Only RabbitMQ has it.
func (b *Broker) Ctl(ctx context.Context, args ...string) (string, error) {
	return script(ctx, append([]string{"ctl", string(b.kind), "--name", b.name, "--"}, args...)...)
}

// script runs scripts/brokers and returns its standard output without the last newline.
// When ctx ends, the script is told to stop, and undoes a start.
func script(ctx context.Context, args ...string) (string, error) {
	path, err := find()
	if err != nil {
		return "", err
	}
	//nolint:gosec // the path is the module's own script
	cmd := exec.CommandContext(ctx, path, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 30 * time.Second
	err = cmd.Run()
	if err == nil {
		return strings.TrimSuffix(stdout.String(), "\n"), nil
	}
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() == leftOut {
		err = ErrLeftOut
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return "", fmt.Errorf("brokers: scripts/brokers %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
}

// leftOut is the exit status of scripts/brokers for ErrLeftOut.
const leftOut = 77

// find returns the path of scripts/brokers in the stormguard module that contains the
// working directory. It ignores modules inside it, such as bench.
func find() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod")) //nolint:gosec // a go.mod above the working directory
		if err == nil && bytes.HasPrefix(mod, []byte("module github.com/stormguard-mq/stormguard\n")) {
			return filepath.Join(dir, "scripts", "brokers"), nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("brokers: %s is not in the stormguard module, whose scripts/brokers starts brokers; set %s and the like to brokers of your own",
				start, Kafka.Env())
		}
	}
}
