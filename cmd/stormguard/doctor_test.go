// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
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
	if !srv.ReadyForConnections(20 * time.Second) {
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
