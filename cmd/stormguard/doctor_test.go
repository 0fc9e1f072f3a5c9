// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rabbitmq/amqp091-go"

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
	if code != exitError || !strings.HasPrefix(stdout, "danger   stream ORDERS: MaxAge is 2h0m0s") || !strings.Contains(stderr, "marked danger") {
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
	if code, _, stderr := command("doctor", "nats", "--url", "nats://127.0.0.1:1", "--stream", "S", "--consumer", "C"); code != exitError || !strings.Contains(stderr, "127.0.0.1:1") {
		t.Errorf("%d %q", code, stderr)
	}
}

// What a broker does not answer, or a flag that cannot be, is told without
// passwords and by the right exit status.
func TestDoctorMistakes(t *testing.T) {
	nats := []string{"doctor", "nats", "--stream", "S", "--consumer", "C", "--url"}
	for _, args := range [][]string{
		append(nats, "nats://bob:s3cret@127.0.0.1:1"),
		append(nats, "bob:s3cret@127.0.0.1:1,bob:s3cret@127.0.0.1:2"),
		append(nats, "nats://bob:%zs3cret@127.0.0.1:1"),
		{"doctor", "kafka", "--topic", "t", "--url", "bob:s3cret@127.0.0.1:1"},
		{"doctor", "rabbitmq", "--queue", "q", "--api", "http://bob:s3cret@127.0.0.1:1"},
		{"doctor", "rabbitmq", "--queue", "q", "--api", "http://bob:%zs3cret@127.0.0.1:1"},
	} {
		if code, stdout, stderr := command(args...); code != exitError || stdout != "" || strings.Contains(stderr, "s3cret") {
			t.Errorf("%v: %d %q %q", args, code, stdout, stderr)
		}
	}
	for _, args := range [][]string{
		append(nats, "nats://127.0.0.1:1", "--hold", "1x"), {"doctor", "kafka", "--topic", "t", "--hold", "1x"}, {"doctor", "rabbitmq", "--queue", "q", "--hold", "1x"},
	} {
		if code, _, stderr := command(args...); code != exitUsage || !strings.Contains(stderr, "--hold") {
			t.Errorf("%v: %d %q", args, code, stderr)
		}
	}
}

func TestDoctorKafka(t *testing.T) {
	url := brokers.ForTest(t, brokers.Kafka)
	topic := "doctor-" + strings.ToLower(rand.Text()[:8])
	admin, err := sarama.NewClusterAdmin(strings.Split(url, ","), sarama.NewConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	for _, name := range []string{topic, topic + ".dlq"} {
		if err := admin.CreateTopic(name, &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: 1}, false); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = admin.DeleteTopic(name) }()
		for range 100 { // the broker learns of a topic by and by
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

func TestDoctorRabbitMQ(t *testing.T) {
	b := brokers.StartForTest(t, brokers.RabbitMQ, brokers.Options{})
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
	if _, err := ch.QueueDeclare("orders", true, false, false, false, amqp091.Table{"x-message-ttl": int64(60000)}); err != nil {
		t.Fatal(err)
	}
	look := []string{"doctor", "rabbitmq", "--api", info["management"], "--queue", "orders"}
	var code int
	var stdout, stderr string
	for range 100 { // the API learns of a queue by and by
		if code, stdout, stderr = command(append(look, "--hold", "59s")...); code == exitOK {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if code != exitOK || stdout != "Nothing found.\n" {
		t.Errorf("%d %q %q", code, stdout, stderr)
	}
	if code, stdout, _ = command(look...); code != exitError || !strings.Contains(stdout, "danger   queue /orders: its messages expire after 1m0s") {
		t.Errorf("%d %q", code, stdout)
	}
	code, _, stderr = command("doctor", "rabbitmq", "--prefetch", "0")
	if code != exitUsage || !strings.Contains(stderr, "--queue: must be given") || !strings.Contains(stderr, `--prefetch "0": must be a number from 1 to 65535`) {
		t.Errorf("%d %q", code, stderr)
	}
}
