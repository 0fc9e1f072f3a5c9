// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// command runs the CLI and returns what it printed.
func command(args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = run(args, &out, &errs)
	return code, out.String(), errs.String()
}

func TestDoctorNATS(t *testing.T) {
	srv, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	srv.Start()
	defer func() { srv.Shutdown(); srv.WaitForShutdown() }()
	if !srv.ReadyForConnections(2 * time.Minute) {
		t.Fatal("the server is not ready")
	}
	nc, err := nats.Connect(srv.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders"}, MaxAge: 2 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "billing"}); err != nil {
		t.Fatal(err)
	}
	sound := []string{"doctor", "nats", "--url", srv.ClientURL(), "--stream", "ORDERS", "--consumer", "billing"}
	if code, stdout, stderr := command(sound...); code != exitOK || stdout != "Nothing found.\n" || stderr != "" {
		t.Errorf("%d %q %q", code, stdout, stderr)
	}
	if code, stdout, _ := command(append(sound, "--json")...); code != exitOK || stdout != "[]\n" {
		t.Errorf("%d %q", code, stdout)
	}
	code, stdout, stderr := command(append(sound, "--hold", "3h")...)
	if code != exitError || !strings.HasPrefix(stdout, "danger   stream ORDERS: MaxAge is 2h0m0s") || !strings.Contains(stderr, "the settings need work") {
		t.Errorf("%d %q %q", code, stdout, stderr)
	}
	code, stdout, _ = command(append(sound, "--hold", "3h", "--json")...)
	var found []map[string]string
	if err := json.Unmarshal([]byte(stdout), &found); err != nil || code != exitError || len(found) != 1 || found[0]["severity"] != "danger" || found[0]["fix"] == "" {
		t.Errorf("%d %v %s", code, err, stdout)
	}
	if code, _, stderr := command("doctor", "nats", "--hold", "1"); code != exitUsage || !strings.Contains(stderr, "--stream: must be given") ||
		!strings.Contains(stderr, "--consumer: must be given") || !strings.Contains(stderr, `--hold "1": must be a duration from 1s`) {
		t.Errorf("%d %q", code, stderr)
	}
	if code, stdout, stderr := command(append(sound, "--dlq", "NONE")...); code != exitError || !strings.HasPrefix(stdout, "warning  stream NONE: it does not exist") {
		t.Errorf("%d %q %q", code, stdout, stderr)
	}
	if code, stdout, _ := command(append(sound, "--dlq", "NONE", "--fail-on", "danger")...); code != exitOK || !strings.HasPrefix(stdout, "warning  ") {
		t.Errorf("--fail-on danger: %d %q", code, stdout)
	}
	for want, args := range map[string][]string{
		"warning  stream TYPO: it does not exist":          {"--stream", "TYPO"},
		"warning  consumer ORDERS/typo: it does not exist": {"--consumer", "typo"},
	} {
		if code, stdout, stderr := command(append(slices.Clone(sound), args...)...); code != exitError || !strings.HasPrefix(stdout, want) {
			t.Errorf("%v: %d %q %q", args, code, stdout, stderr)
		}
	}
	if code, _, stderr := command("doctor", "nats", "--url", "nats://127.0.0.1:1", "--stream", "S", "--consumer", "C"); code != exitUnseen || !strings.Contains(stderr, "127.0.0.1:1") {
		t.Errorf("%d %q", code, stderr)
	}
}

// What a broker does not answer, or a flag that cannot be, is told without
// passwords and by the right exit status.
func TestDoctorMistakes(t *testing.T) {
	nats := []string{"doctor", "nats", "--stream", "S", "--consumer", "C", "--url"}
	kafka := []string{"doctor", "kafka", "--topic", "t", "--url"}
	rabbit := []string{"doctor", "rabbitmq", "--queue", "q", "--url"}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{append(nats, "nats://bob:s3cret@127.0.0.1:1"), exitUnseen, "127.0.0.1:1"},
		{append(nats, "bob:s3cret@127.0.0.1:1,bob:s3cret@127.0.0.1:2"), exitUnseen, "127.0.0.1:2"},
		{append(nats, "nats://bob:%zs3cret@127.0.0.1:1"), exitUnseen, "connect to"},
		{append(kafka, "127.0.0.1:1"), exitUnseen, "connect to 127.0.0.1:1"},
		{append(rabbit, "http://bob:s3cret@127.0.0.1:1"), exitUnseen, "127.0.0.1:1"},
		{append(nats, "amqp://bob:s3cret@127.0.0.1:1"), exitUsage, "must be nats://host:port"},
		{append(kafka, "bob:s3cret@127.0.0.1:1"), exitUsage, "must be host:port,host:port"},
		{append(rabbit, "http://bob:%zs3cret@127.0.0.1:1"), exitUsage, "must be http://user:password@host:port"},
		{append(rabbit, "amqp://bob:s3cret@127.0.0.1:5672"), exitUsage, "of the management plugin"},
		{append(rabbit, "http://bob:s3cret@127.0.0.1:1", "--ca", "ca.pem"), exitUsage, "need https://"},
		{append(kafka, "127.0.0.1:1", "--user", "bob"), exitUsage, "--password-file: must be given together"},
		{append(kafka, "127.0.0.1:1", "--sasl", "gssapi"), exitUsage, "plain, scram-sha-256 or scram-sha-512"},
		{append(kafka, "127.0.0.1:1", "--ca", "no/such/file"), exitUsage, "--ca: open no/such/file"},
		{append(kafka, "127.0.0.1:1", "--dlq", "{nobody}"), exitUsage, "{nobody}"},
		{append(nats, "nats://127.0.0.1:1", "--hold", "1x"), exitUsage, "--hold"},
		{append(kafka, "127.0.0.1:1", "--fail-on", "luck"), exitUsage, "notice, warning or danger"},
		{append(rabbit, "http://127.0.0.1:1", "--hold", "1x"), exitUsage, "--hold"},
	} {
		if code, stdout, stderr := command(c.args...); code != c.code || stdout != "" || !strings.Contains(stderr, c.want) || strings.Contains(stderr, "s3cret") {
			t.Errorf("%v: %d %q %q", c.args, code, stdout, stderr)
		}
	}
}

// The exit status by --fail-on and what was found.
func TestDoctorFailOn(t *testing.T) {
	for _, c := range []struct {
		failOn severity
		found  guard.Severity
		want   bool
	}{
		{"notice", guard.Notice, true}, {"warning", guard.Notice, false}, {"warning", guard.Warning, true}, {"warning", guard.Danger, true},
		{"danger", guard.Warning, false}, {"danger", guard.Danger, true},
	} {
		e := examination{failOn: c.failOn}
		if bad, err := e.report(io.Discard, []guard.Finding{{Severity: c.found}}); bad != c.want || err != nil {
			t.Errorf("%+v: %t, %v", c, bad, err)
		}
	}
	e := examination{failOn: "notice"}
	if bad, _ := e.report(io.Discard, nil); bad {
		t.Error("nothing found, and yet bad")
	}
}

// A look that fails half-way prints what it found, and is not taken for a whole
// one.
func TestDoctorHalfALook(t *testing.T) {
	cmd := newDoctorKafka()
	var out bytes.Buffer
	cmd.SetOut(&out)
	e := examination{failOn: "warning"}
	err := e.look(cmd, func(context.Context, *access.Access) ([]guard.Finding, error) {
		return []guard.Finding{{Severity: guard.Danger, Where: "topic t"}}, errors.New("refused")
	})
	if !errors.As(err, new(lookError)) || !strings.Contains(out.String(), "danger   topic t") {
		t.Errorf("%v %q", err, out.String())
	}
}

func TestDoctorKafka(t *testing.T) {
	url := brokers.ForTest(t, brokers.Kafka)
	topic := "doctor-" + strings.ToLower(rand.Text()[:8])
	config := sarama.NewConfig()
	config.Admin.Timeout = 30 * time.Second // of 3s a busy broker may need more
	admin, err := sarama.NewClusterAdmin(strings.Split(url, ","), config)
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	for _, name := range []string{topic, topic + ".dlq"} {
		if err := admin.CreateTopic(name, &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: 1}, false); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = admin.DeleteTopic(name) }()
		for range 600 { // the broker learns of a topic by and by
			if about, err := admin.DescribeTopics([]string{name}); err == nil && len(about) == 1 && about[0].Err == sarama.ErrNoError {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	look := []string{"doctor", "kafka", "--url", url, "--topic", topic}
	if code, stdout, stderr := command(append(look, "--hold", "24h")...); code != exitError || strings.Contains(stdout, "in an outage of 24h0m0s") ||
		!strings.Contains(stdout, "danger   topic "+topic+".dlq: its retention of 168h0m0s counts from the message's own time") {
		t.Errorf("%d %q %q", code, stdout, stderr)
	}
	if code, stdout, _ := command(append(look, "--hold", "240h")...); code != exitError || !strings.Contains(stdout, "danger   topic "+topic+": it keeps messages for 168h0m0s") {
		t.Errorf("%d %q", code, stdout)
	}
	if code, stdout, stderr := command("doctor", "kafka", "--url", url, "--topic", topic+"-typo"); code != exitError ||
		!strings.Contains(stdout, "topic "+topic+"-typo: it does not exist") {
		t.Errorf("%d %q %q", code, stdout, stderr)
	}
	retry := append(slices.Clone(look), "--group", "g", "--retry-delays", "1m, 10m")
	if code, stdout, stderr := command(retry...); code != exitError || !strings.Contains(stdout, "warning  topic "+topic+".g.retry.2: it does not exist: nothing of "+topic+" can be parked for 10m0s") {
		t.Errorf("%d %q %q", code, stdout, stderr)
	}
	if _, stdout, _ := command(append(retry, "--retry-topic", "{topic}.again.{level}")...); !strings.Contains(stdout, "topic "+topic+".again.1: it does not exist") {
		t.Errorf("%q", stdout)
	}
	for want, args := range map[string][]string{
		`--retry-delays "1m,x": must be durations with commas`: {"--group", "g", "--retry-delays", "1m,x"},
		"--group: must be given with --retry-delays":           {"--retry-delays", "1m"},
		"RetryConfig.Delays[1]: 1m0s does not ascend":          {"--group", "g", "--retry-delays", "10m,1m"},
		"--retry-topic: needs --retry-delays":                  {"--retry-topic", "r"},
	} {
		if code, stdout, stderr := command(append(slices.Clone(look), args...)...); code != exitUsage || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("%v: %d %q %q", args, code, stdout, stderr)
		}
	}
	if code, _, stderr := command("doctor", "kafka", "--url", ""); code != exitUsage || !strings.Contains(stderr, "--url: must be given") || !strings.Contains(stderr, "--topic: must be given") {
		t.Errorf("%d %q", code, stderr)
	}
}

func TestDoctorRabbitMQ(t *testing.T) { //nolint:tparallel // one broker after another
	t.Parallel()
	for _, kind := range []brokers.Kind{brokers.RabbitMQ, brokers.RabbitMQ4} {
		t.Run(string(kind), func(t *testing.T) { testDoctorRabbitMQ(t, kind) })
	}
	code, _, stderr := command("doctor", "rabbitmq", "--prefetch", "0")
	if code != exitUsage || !strings.Contains(stderr, "--queue: must be given") || !strings.Contains(stderr, `--prefetch "0": must be a number from 1 to 65535`) {
		t.Errorf("%d %q", code, stderr)
	}
}

func testDoctorRabbitMQ(t *testing.T, kind brokers.Kind) {
	b := brokers.StartForTest(t, kind, brokers.Options{})
	info, err := b.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := amqp091.Dial(b.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string]amqp091.Table{
		"orders":  {"x-message-ttl": int64(60000)},
		"letters": {"x-queue-type": "quorum"},
		"quorum":  {"x-queue-type": "quorum", "x-dead-letter-exchange": "", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"},
	} {
		if _, err := ch.QueueDeclare(name, true, false, false, false, args); err != nil {
			t.Fatal(err)
		}
	}
	const (
		classic = "warning  queue /orders: it is a classic queue: one node keeps it. It counts no deliveries"
		noPlace = "warning  queue /orders: it has no dead-letter exchange, and no queue of dead letters is named"
		expire  = "danger   queue /orders: its messages expire after 1m0s"
	)
	for _, c := range []struct {
		args []string
		code int
		want []string // the findings, each by its beginning
	}{
		{[]string{"--queue", "orders", "--hold", "59s"}, exitError, []string{classic, noPlace}},
		{[]string{"--queue", "orders"}, exitError, []string{expire, classic, noPlace}},
		{[]string{"--queue", "orders", "--dlq", "letters", "--fail-on", "danger"}, exitError, []string{expire, classic, "warning  queue /letters: it has one replica"}},
		{[]string{"--queue", "quorum", "--prefetch", "10"}, exitError, []string{"warning  queue /quorum: it has one replica"}},
		{[]string{"--queue", "quorum", "--prefetch", "10", "--fail-on", "danger"}, exitOK, []string{"warning  queue /quorum: it has one replica"}},
		{[]string{"--queue", "quorum", "--prefetch", "10", "--dlq", "typo"}, exitError,
			[]string{"warning  queue /quorum: it has one replica", "warning  queue /typo: it does not exist"}},
		{[]string{"--queue", "typo"}, exitError, []string{"danger   queue /typo: it does not exist"}},
	} {
		args := append([]string{"doctor", "rabbitmq", "--url", info["management"]}, c.args...)
		var code int
		var stdout, stderr string
		for range 600 { // the API learns of a queue by and by
			if code, stdout, stderr = command(args...); code == c.code && begins(stdout, c.want) {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		if code != c.code || !begins(stdout, c.want) {
			t.Errorf("%v: %d %q %q", c.args, code, stdout, stderr)
		}
	}
	if code, stdout, stderr := command("doctor", "rabbitmq", "--queue", "orders", "--url", strings.Replace(info["management"], "guest:guest", "guest:s3cret", 1)); code != exitUnseen ||
		stdout != "" || !strings.Contains(stderr, "401") || strings.Contains(stderr, "s3cret") {
		t.Errorf("%d %q %q", code, stdout, stderr)
	}
}

// begins tells whether the findings, two lines each, are these; RabbitMQ 4 has
// notices beside them.
func begins(stdout string, want []string) bool {
	lines := strings.Split(strings.TrimSuffix(stdout, "\n"), "\n")
	for len(lines) > 2 && strings.HasPrefix(lines[len(lines)-2], "notice ") {
		lines = lines[:len(lines)-2]
	}
	if len(lines) != 2*len(want) {
		return false
	}
	for i, w := range want {
		if !strings.HasPrefix(lines[2*i], w) {
			return false
		}
	}
	return true
}
