// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package examples

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
	"github.com/stormguard-mq/stormguard/adapters/kafka"
	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/examples/internal/embedded"
	"github.com/stormguard-mq/stormguard/examples/internal/queues"
	"github.com/stormguard-mq/stormguard/examples/internal/topics"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

var diffBlock = regexp.MustCompile("(?s)```diff\n(.*?)```")

const (
	messages = 20
	poison   = 13
	cause    = "the card is blocked"

	// shared is what each program has around its consumer. What it charged it prints.
	shared = `package main

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

func charge(body []byte) error {
	if string(body) == "13" {
		return errors.New("` + cause + `")
	}
	fmt.Println(string(body))
	return nil
}
`
	kafkaProgram = shared + `
type billing struct{}

func (billing) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (billing) Cleanup(sarama.ConsumerGroupSession) error { return nil }
func (billing) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
%[2]s
	return nil
}

func run(ctx context.Context, url, topic string) error {
	brokers, topics := []string{url}, []string{topic}
	config := sarama.NewConfig()
	config.Version = sarama.V3_6_0_0
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	var handler sarama.ConsumerGroupHandler = billing{}
%[1]s
	return nil
}
`
	rabbitProgram = shared + `
func run(ctx context.Context, url, _ string) error {
	conn, err := amqp091.Dial(url)
	if err != nil {
		return err
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	if err := ch.Qos(10, 0, false); err != nil {
		return err
	}
	go func() {
		<-ctx.Done()
		ch.Close()
	}()
%[1]s
	return nil
}
`
	natsProgram = shared + `
func run(ctx context.Context, url, _ string) error {
	nc, err := nats.Connect(url)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
%[1]s
	<-ctx.Done()
	consuming.Stop()
	return nil
}
`
)

// A wrapped program is the program of a page of docs, as it is before and after the
// page's diff.
type wrapped struct {
	page, program string
	rename        string // what the page calls the queue, where it must be another here
	prepare       func(*testing.T) (url, name string, letters func() ([]dlq.Record, error))
}

// The programs of docs/kafka.md, rabbitmq.md and nats.md are wrapped by at most six changed
// lines, as they stand there. Each then charges all orders but one in order, has the one in
// its DLQ with its error, says so in its log, and ends when it is told to.
func TestDiffs(t *testing.T) {
	for name, w := range map[string]wrapped{
		"kafka":     {page: "kafka.md", program: kafkaProgram, prepare: onKafka},
		"rabbitmq":  {page: "rabbitmq.md", program: rabbitProgram, rename: `"orders`, prepare: onRabbitMQ},
		"jetstream": {page: "nats.md", program: natsProgram, prepare: onJetStream},
	} {
		t.Run(name, func(t *testing.T) { w.test(t) })
	}
}

func (w wrapped) test(t *testing.T) {
	before, after := w.sources(t)
	url, name, letters := w.prepare(t)
	if w.rename != "" {
		before, after = strings.ReplaceAll(before, w.rename, `"`+name), strings.ReplaceAll(after, w.rename, `"`+name)
	}
	compile(t, before)
	program := exec.CommandContext(t.Context(), link(t, after), url, name)
	out, err := program.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	logged, err := program.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := program.Start(); err != nil {
		t.Fatal(err)
	}
	// A program that hangs is killed, which ends its output too.
	hung := time.AfterFunc(2*time.Minute, func() { _ = program.Process.Kill() })
	defer hung.Stop()

	var log strings.Builder // of the goroutine below until its end
	told, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tell := sync.OnceFunc(func() { close(told) })
		for lines := bufio.NewScanner(logged); lines.Scan(); {
			fmt.Fprintln(&log, lines.Text())
			if strings.Contains(lines.Text(), "WARN") && strings.Contains(lines.Text(), cause) {
				tell()
			}
		}
	}()

	var charged, want []string
	for i := 1; i <= messages; i++ {
		if i != poison {
			want = append(want, strconv.Itoa(i))
		}
	}
	for lines := bufio.NewScanner(out); len(charged) < len(want) && lines.Scan(); {
		charged = append(charged, lines.Text())
	}
	if !slices.Equal(charged, want) {
		t.Errorf("charged %q", charged)
	}
	records, err := letters()
	for deadline := time.Now().Add(time.Minute); len(records) == 0 && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond) // a broker has no event for this
		records, err = letters()
	}
	if len(records) != 1 || string(records[0].Body) != strconv.Itoa(poison) || records[0].Error.Message != cause {
		t.Errorf("dead letters %+v, %v", records, err)
	}
	// The broker shows a letter before the program has its confirmation and says so.
	select {
	case <-told:
	case <-ended:
	case <-time.After(time.Minute):
	}
	if err := program.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	<-ended
	if err := program.Wait(); err != nil {
		t.Error("the program ended with", err)
	}
	select {
	case <-told:
	default:
		t.Error("its log does not say what failed")
	}
	if t.Failed() {
		t.Logf("its log:\n%s", log.String())
	}
}

// sources are the program without the page's diffs, and with them.
func (w wrapped) sources(t *testing.T) (before, after string) {
	text := string(read(t, filepath.Join("..", "docs", w.page)))
	var old, changed []any
	lines := 0
	for _, block := range diffBlock.FindAllStringSubmatch(text, -1) {
		var from, to strings.Builder
		for line := range strings.Lines(block[1]) {
			kind, rest := line[:1], line[1:]
			if kind != "+" {
				from.WriteString(rest)
			}
			if kind != "-" {
				to.WriteString(rest)
			}
			if kind == "+" {
				lines++
			}
		}
		old, changed = append(old, from.String()), append(changed, to.String())
	}
	if len(old) == 0 || lines == 0 || lines > 6 {
		t.Fatalf("%s has %d diffs of %d new lines: want at most 6", w.page, len(old), lines)
	}
	return fmt.Sprintf(w.program, old...), fmt.Sprintf(w.program, changed...)
}

// compile compiles a program in this module. It is not run, so it is not linked.
func compile(t *testing.T, code string) {
	t.Helper()
	toModule(t, code, "list", "-export")
}

// link builds a program in this module and returns its path.
func link(t *testing.T, code string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "program")
	toModule(t, code, "build", "-ldflags=-w", "-o", program)
	return program
}

// toModule runs a go command on a program, as if the program stood in this module.
func toModule(t *testing.T, code string, command ...string) {
	t.Helper()
	head, body, _ := strings.Cut(code, "\n")
	var source strings.Builder
	source.WriteString(head + "\n")
	for name, path := range imports {
		if regexp.MustCompile(`\b` + name + `\.[A-Z]`).MatchString(body) {
			fmt.Fprintf(&source, "import %s %q\n", name, path)
		}
	}
	source.WriteString(body)
	file := filepath.Join(t.TempDir(), "main.go")
	write(t, file, []byte(source.String()))
	run := exec.CommandContext(t.Context(), "go", append(command, file)...)
	run.Dir = ".." // the module
	run.Env = append(os.Environ(), "GOWORK=off")
	if out, err := run.CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v\n%s\n%s", command[0], err, out, source.String())
	}
}

func onKafka(t *testing.T) (url, name string, letters func() ([]dlq.Record, error)) {
	t.Setenv(brokers.Kafka.Env(), brokers.ForTest(t, brokers.Kafka))
	topic, err := topics.New("orders")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { topic.Close(topic.Name + ".dlq") })
	for i := 1; i <= messages; i++ {
		if err := topic.Publish(strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
	}
	return topics.Addrs()[0], topic.Name, func() (all []dlq.Record, err error) {
		dead, err := topic.Read(t.Context(), topic.Name+".dlq")
		for _, m := range dead {
			r, err := guardkafka.ReadDeadLetter(m)
			if err != nil {
				return nil, err
			}
			all = append(all, r)
		}
		return all, err
	}
}

func onRabbitMQ(t *testing.T) (url, name string, letters func() ([]dlq.Record, error)) {
	t.Setenv(brokers.RabbitMQ.Env(), brokers.ForTest(t, brokers.RabbitMQ))
	queue, err := queues.New("orders")
	if err != nil {
		t.Fatal(err)
	}
	dead := queue.Name + ".dlq"
	t.Cleanup(func() { queue.Close(dead) })
	for i := 1; i <= messages; i++ {
		if err := queue.Publish(t.Context(), strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
	}
	return queues.URL(), queue.Name, func() (all []dlq.Record, err error) {
		// The program makes the queue, so it is there once something was charged.
		got, err := queue.Get(dead)
		for _, d := range got {
			r, err := guardamqp.ReadDeadLetter(d)
			if err != nil {
				return nil, err
			}
			all = append(all, r)
		}
		return all, err
	}
}

func onJetStream(t *testing.T) (url, name string, letters func() ([]dlq.Record, error)) {
	nc, stop, err := embedded.Connect()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}})
	if err != nil {
		t.Fatal(err)
	}
	durable := jetstream.ConsumerConfig{Durable: "billing", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 1000}
	if _, err := stream.CreateConsumer(t.Context(), durable); err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= messages; i++ {
		if _, err := js.Publish(t.Context(), "orders.new", []byte(strconv.Itoa(i))); err != nil {
			t.Fatal(err)
		}
	}
	return nc.ConnectedUrl(), "ORDERS", func() ([]dlq.Record, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		dead, err := js.Stream(ctx, "ORDERS_DLQ")
		if err != nil {
			return nil, err
		}
		reader, err := dead.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
		if err != nil {
			return nil, err
		}
		m, err := reader.Next(jetstream.FetchMaxWait(30 * time.Second))
		if err != nil {
			return nil, err
		}
		r, err := guardnats.ReadDeadLetter(m)
		return []dlq.Record{r}, err
	}
}
